"""Input checks that raise before a cache changes, and that do not make the host wait for a GPU."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcache_compress.codecs.base import Side

CROPS_TO_LENGTH = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20)
"""True for Transformers before 5.20, whose `crop` takes a positive number as the length to keep."""
LONGEST = torch.finfo(torch.float16).max
"""Largest norm of a vector that can be packed, because norms and scales are stored in 16 bits."""


def longest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest norm of vectors `[..., D]`, a scalar of at least float32; NaN if any vector has one."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).amax()


def not_packable_error(what: str, layer: int | None) -> ValueError:
    """Make the error for keys or values that are not finite or have a norm above `LONGEST`."""
    return ValueError(
        f"{what} of {'a layer' if layer is None else f'layer {layer}'} hold NaN, infinity or norms above {LONGEST:g}, "
        "which cannot be packed. Try a wider dtype for the model"
    )


def full_error(layer: int, capacity: int) -> ValueError:
    """Make the error for more tokens than a static layer can hold."""
    return ValueError(f"layer {layer} is full: max_cache_len={capacity} is too small for these tokens")


def same_prompt(first: torch.Tensor) -> bool:
    """Return True if all rows of keys or values `[B, H, T, D]` come from one prompt, up to rounding errors.

    Rows that are not finite pass, because other checks refuse them.
    """
    if first.shape[0] == 1 or not first.isfinite().all():
        return True
    size = first.float().norm(dim=-1)
    return bool(((first - first[:1]).float().norm(dim=-1) <= 0.05 * (size + size.mean())).all())


class PackableChecks:
    """Checks of the vectors that a layer is about to pack.

    On the CPU a check raises at once. On a GPU `raise_for_known` raises once the result has arrived.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._under_way: list[tuple[Side, torch.Tensor, torch.cuda.Event]] = []

    def add(self, side: Side, x: torch.Tensor) -> None:
        """Check vectors `[..., D]` for NaN, infinity and norms that 16 bits cannot hold."""
        good = longest(x) <= LONGEST  # NaN fails the comparison too
        if good.device.type == "cpu":
            if not good:
                raise not_packable_error(side, self.layer)
            return
        on_host = torch.empty_like(good, device="cpu", pin_memory=True)
        on_host.copy_(good, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(good.device))
        self._under_way.append((side, on_host, event))

    def raise_for_known(self) -> None:
        """Raise for failed checks whose results have arrived, without waiting for the others."""
        while self._under_way and self._under_way[0][2].query():
            side, good, _ = self._under_way.pop(0)
            if not good:
                raise not_packable_error(side, self.layer)


def check_states(
    layer: int, keys: Any, values: Any, held: Mapping[Side, torch.Tensor] | None = None, any_batch: bool = False
) -> None:
    """Check that new keys and values are `[B, H, T, D]` and match the sides `held` by the layer, if any.

    any_batch: True if their batch may differ from that of `held`, which have no tokens.
    """
    held = held or {}
    for side, x in (("keys", keys), ("values", values)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{side} of layer {layer} must be floating-point tensors (got {kind})")
    known = held["keys"].shape[1] if held else keys.shape[1] if keys.ndim == 4 else None
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[1] != known:
        raise ValueError(
            f"keys and values of layer {layer} must be [B, H, T, D] with equal B, H and T"
            f"{f', and H = {known}' if known else ''} (got {tuple(keys.shape)} and {tuple(values.shape)})"
        )
    for (side, old), x in zip(held.items(), (keys, values), strict=False):
        if (x.shape[3], x.device) != (old.shape[3], old.device):
            raise ValueError(
                f"{side} of layer {layer} have D={x.shape[3]} on {x.device}, but the cache holds D={old.shape[3]} on "
                f"{old.device}"
            )
        if x.shape[0] != old.shape[0] and not any_batch:
            raise ValueError(
                f"batch of {x.shape[0]} for a cache that holds {old.shape[0]}: change its batch with "
                "batch_select_indices or batch_repeat_interleave, or empty it with reset()"
            )


def tokens_after_crop(tokens_to_remove: Any, length: int) -> int:
    """Return how many of `length` tokens a crop leaves; raises `ValueError` where Transformers refuses the argument."""
    count = operator.index(tokens_to_remove)
    if count > 0 and CROPS_TO_LENGTH:
        count = min(0, count - length)
    if count > 0:
        raise ValueError(
            f"crop({count}): the number of tokens to remove must be negative or zero. Write "
            f"crop({count} - cache.get_seq_length()) to keep the first {count}, or crop(-{count}) to remove the last"
        )
    return max(0, length + count)


def check_croppable(layers: Iterable[Any]) -> None:
    """Raise `ValueError` if a layer no longer holds the past tokens that a crop would restore."""
    for index, layer in enumerate(layers):
        limited = isinstance(layer, LinearAttentionCacheLayerMixin) or (
            getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.get_max_length()
        )
        if not hasattr(layer, "crop") or (limited and not getattr(layer, "record_past", True)):
            raise ValueError(
                f"layer {index}, a {type(layer).__name__}, cannot be cropped: it does not record its past. Call "
                "cache.activate_past_recording() before the first token, if all layers support it"
            )
