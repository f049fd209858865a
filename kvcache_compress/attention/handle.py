"""Handles that `update()` returns in place of tensors while fused attention is on; other code gets them decoded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.codecs.backend import on_device
from kvcache_compress.codecs.base import Backend, PromptQueries, Side
from kvcache_compress.storage.segments import SideSegments

from .decoded import decoded
from .path import AttentionPath, attention, path_over, record

if TYPE_CHECKING:
    from kvcache_compress.cache.layer import CompressedLayer

    from .compile_ops import TracedStep


@dataclass(slots=True, weakref_slot=True)
class Step:
    """Keys and values of a layer that a step attends to: its own tokens and all before them.

    Args:
        keys, values: segments of both sides.
        backend: the layer's backend.
        capacity: `max_cache_len` of a static layer, whose masks have that many tokens; else None.
        observer: called with the step's queries, if packing waits for them.
    """

    keys: SideSegments
    values: SideSegments
    backend: Backend
    capacity: int | None = None
    observer: Callable[[PromptQueries], None] | None = None
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
        return self.keys.dense(), self.values.dense(), self._over_tokens(mask)

    def _over_tokens(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Trim a mask `[B, T]` or `[B or 1, Hq or 1, n, T]` to written tokens."""
        return mask if mask is None or self.capacity is None else mask[..., : self.keys.shape[2]]

    def _over_stored(self, mask: torch.Tensor | None, count: int) -> torch.Tensor:
        """Bring the mask of `count` queries into the order in which left-padded rows store their tokens."""
        keys, slots = self.keys, self.keys.slots
        assert keys.padding is not None
        if slots is None:
            tokens, sinks, length = keys.shape[2], keys.sinks.shape[2], None
            if mask is not None and mask.ndim == 2:
                mask = self._over_tokens(mask)
        else:
            tokens, sinks, length = slots.capacity, slots.sinks, slots.length
            if mask is not None and mask.ndim == 2:
                mask = torch.nn.functional.pad(mask, (0, tokens - mask.shape[1]))
        return keys.padding.mask(mask, sinks, count, tokens, keys.tail_buffer.device, length)

    def path(self, query: torch.Tensor, softcap: float | None) -> AttentionPath:
        return path_over(self, query, softcap)

    def show_queries(self, query: torch.Tensor, mask: Any, scaling: float, options: Mapping[str, Any]) -> bool:
        """Show the step's queries to the layer, if packing waits for them, and return True if it did.

        Masks that are no tensors are not read. Layers that share keys and values show theirs too; the first ones count.
        """
        if self.observer is None:
            return False
        mask = self._over_tokens(mask) if isinstance(mask, torch.Tensor) else None
        self.observer(PromptQueries(query, mask, scaling, options.get("softcap"), options.get("s_aux")))
        return True

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        s_aux: torch.Tensor | None,
        path: AttentionPath | None = None,
    ) -> torch.Tensor:
        """Attend with queries `[B, Hq, n, Dk]` to both sides: `[B, n, Hq, Dv]`; arguments as in `reference.attend`.

        `mask` is over tokens, spare capacity of a static layer included, or flash attention's padding mask `[B, T]`.
        `path` is by default that of `self.path`; the layer's backend replaces `decode`.
        """
        path = path or self.path(query, softcap)
        path = self.backend if path == "decode" else path
        record(path, query.shape[2])
        slots, count = self.keys.slots, query.shape[2]
        if self.keys.padding is not None:
            mask = self._over_stored(mask, count)
        if slots is None:
            mask = self._over_tokens(mask)
            if mask is not None and mask.ndim == 2 and path != "tiled":
                tokens = self.keys.shape[2]
                causal = torch.ones(count, tokens, dtype=torch.bool, device=mask.device).tril(tokens - count)
                mask = causal & mask[:, None, None, -tokens:].bool()
        elif path != "triton":  # Triton's kernels make the mask over slots themselves
            mask = slots.mask(mask, count)
        with on_device(query):
            return attention(path)(query, self.keys, self.values, mask, scaling=scaling, softcap=softcap, s_aux=s_aux)


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
