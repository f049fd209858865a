"""Handles that `update()` returns in place of tensors while fused attention is on; other code gets them decoded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.storage.backend import Backend
from kvcache_compress.storage.segments import SideSegments

from .decoded import decoded
from .path import AttentionPath, path_over, record

if TYPE_CHECKING:
    from kvcache_compress.cache.layer import CompressedLayer

    from .compile_ops import TracedStep


@dataclass(slots=True, weakref_slot=True)
class Step:
    """Keys and values of a layer that a step attends to: its own tokens and all before them.

    Args:
        keys, values: segments of both sides.
        backend: the layer's back end.
        capacity: `max_cache_len` of a static layer, whose masks have that many tokens; else None.
        closes: called with the step's attention, if packing waits for its queries.
    """

    keys: SideSegments
    values: SideSegments
    backend: Backend
    capacity: int | None = None
    closes: Callable[[AttentionCall], None] | None = None
    layer: weakref.ref[CompressedLayer] | None = None
    """The layer, while it holds exactly the tokens of this step; writes then reach it. None afterwards."""

    @property
    def packed(self) -> int:
        """Packed tokens per sequence; in a static layer on a GPU, the capacity for them."""
        return self.keys.packed

    def side(self, side: Side) -> SideSegments:
        return self.keys if side == "keys" else self.values

    def shape(self, side: Side) -> torch.Size:
        """Return the logical shape `[B, H, T, D]`, in which `T` is the capacity of a static layer."""
        batch, heads, tokens, dim = self.side(side).shape
        return torch.Size((batch, heads, self.capacity or tokens, dim))

    def dtype(self, side: Side) -> torch.dtype:
        return self.side(side).tail_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.tail_buffer.device

    def dense(self, side: Side) -> torch.Tensor:
        """Decode a side, `[B, H, T, D]`; spare capacity of a static layer is zero."""
        return self.decode(self.side(side))

    def writable(self, side: Side) -> torch.Tensor:
        """Decode a side for code that may write into it; its writes reach the layer (`DecodedTensor`)."""
        return decoded(self, side)

    def decode(self, segments: SideSegments) -> torch.Tensor:
        """Decode segments of a side as `dense` does."""
        dense = segments.dense()
        if segments.slots is not None:
            dense = segments.slots.by_token(dense)
            if segments.padding is not None:
                segments.padding.exchange_(dense.mT, segments.slots.sinks, segments.slots.length)
            return dense
        if self.capacity is not None:
            return torch.nn.functional.pad(dense, (0, 0, 0, self.capacity - dense.shape[2]))
        return dense

    def release(self, kept: int | None) -> bool:
        """Copy the tokens that the layer is about to change; True if all tokens of the step are copied.

        The layer may keep only the first `kept` tokens. None means that packed tokens stay as they are.
        """
        sides = (self.keys, self.values)
        if self.layer is not None:
            self.layer = None
            for side in sides:
                side.own_dense()
        whole = kept is not None and self.packed > 0 and self.keys.sinks.shape[2] + self.packed > kept
        if whole:
            for side in sides:
                side.own_packed()
        return whole

    def without_spare_capacity(
        self, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return both sides decoded and their mask, trimmed to written tokens unless their number is on the device."""
        if self.keys.slots is not None:
            return self.dense("keys"), self.dense("values"), mask
        return self.keys.dense(), self.values.dense(), self._over_tokens(Mask(mask)).tensor

    def path(self, call: AttentionCall) -> AttentionPath | None:
        return path_over(self, call)

    def close(self, call: AttentionCall) -> bool:
        """Let the layer pack what waits for the queries of this attention; False if nothing did."""
        if self.closes is None:
            return False
        self.closes(replace(call, mask=self._over_tokens(call.mask)))
        return True

    def attend(self, call: AttentionCall, path: AttentionPath | None = None) -> torch.Tensor:
        """Attend to both sides: `[B, n, Hq, Dv]`.

        The call's mask is over tokens, spare capacity of a static layer included. `path` is by default that of
        `self.path`, or else the layer's back end.
        """
        path = path or self.path(call) or self.backend
        record(path.name, call.query.shape[2])
        mask = self._stored_mask(call, path)
        if mask is not call.mask:
            call = replace(call, mask=mask)
        with on_device(call.query):
            return path.attend(call, self.keys, self.values)

    def _over_tokens(self, mask: Mask) -> Mask:
        """Trim a mask to written tokens."""
        return mask if self.capacity is None else mask.trimmed(self.keys.shape[2])

    def _stored_mask(self, call: AttentionCall, path: AttentionPath) -> Mask:
        """Mask over stored tokens, or over slots, as this path takes it."""
        keys, mask, count = self.keys, call.mask, call.query.shape[2]
        slots, padding, device = keys.slots, keys.padding, call.query.device
        if slots is not None:
            if padding is not None:
                mask = mask.exchanged(padding, slots.sinks, count, slots.capacity, device, slots.length)
            return mask if path.takes_token_masks and keys.packed else slots.mask(mask, count)
        tokens = keys.shape[2]
        if padding is not None:  # exchanged before it is trimmed, so that all layers share the result
            mask = mask if mask.is_by_query else self._over_tokens(mask)
            return self._over_tokens(mask.exchanged(padding, keys.sinks.shape[2], count, tokens, device))
        mask = self._over_tokens(mask)
        return mask if path.takes_padding_masks else mask.by_query(count, tokens)


class PackedKV:
    """Handle of one layer's compressed keys or values. It reports their logical shape; any other use decodes them.

    `step` has both sides, because attention needs both.
    """

    __slots__ = ("side", "step")

    def __init__(self, step: Step | TracedStep, side: Side) -> None:
        self.step = step
        self.side = side

    @property
    def shape(self) -> torch.Size:
        return self.step.shape(self.side)

    @property
    def dtype(self) -> torch.dtype:
        return self.step.dtype(self.side)

    @property
    def device(self) -> torch.device:
        return self.step.device

    @property
    def ndim(self) -> int:
        return 4

    def dense(self) -> torch.Tensor:
        """Decode this side, `[B, H, T, D]`; writes into the result reach the layer (`DecodedTensor`)."""
        return self.step.writable(self.side)

    def to(self, target: Any, *args: Any, **kwargs: Any) -> PackedKV | torch.Tensor:
        """Return the handle itself if it is already on device `target`, as a tensor would; else decode and move it."""
        if isinstance(target, torch.device) and target == self.device and not args and not kwargs.get("dtype"):
            return self
        return self.dense().to(target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.dense()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.dense()[index] = value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(value: Any) -> Any:
            if isinstance(value, PackedKV):
                return value.dense()
            return type(value)(plain(item) for item in value) if isinstance(value, (list, tuple)) else value

        return func(*plain(args), **{name: plain(value) for name, value in (kwargs or {}).items()})

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"PackedKV({self.side}, shape={tuple(self.shape)}, packed={self.step.packed})"


def _decoding(name: str) -> Callable[..., Any]:
    def operator(view: PackedKV, *operands: Any) -> Any:
        return getattr(view.dense(), name)(*operands)

    return operator


# Python looks operators up on the class, without `__getattr__`.
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "neg",
    "iter",
    "pow",
    "floordiv",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
):
    setattr(PackedKV, f"__{_name}__", _decoding(f"__{_name}__"))


def gradients_wanted(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if attention to these new keys and values must be differentiable."""
    return (keys.requires_grad or values.requires_grad) and torch.is_grad_enabled()


def with_step(dense: torch.Tensor, states: torch.Tensor, start: torch.Tensor | int) -> torch.Tensor:
    """Put a step's own tokens `[B, H, n, D]` into `dense` `[B, H, T, D]` from `start` on.

    Gradients reach them there, but not the tokens that were read from a cache.
    """
    at = torch.arange(states.shape[2], device=dense.device) + start
    return dense.index_copy(2, at, states.to(dense.dtype))
