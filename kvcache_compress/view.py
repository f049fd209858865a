"""What `update()` returns while fused attention is on: a side of a layer that decodes itself for any foreign code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from .backend import load_part, on_device
from .codec import Backend, Codec, Side
from .rope import Rope
from .rope_track import RopeTrack
from .store import PackedStore

CHUNK_TOKENS = 2048
"""Packed tokens decoded at a time; a multiple of every group size."""
MAX_CPP_QUERIES = 128
"""Queries of a chunk that C++ attends with; for more of them PyTorch's attention over decoded tiles is faster."""
MAX_DECODE_TOKENS = 16
"""Queries of a decode step, at most: one, or those of speculative decoding. More are a part of a prompt."""


@dataclass(slots=True)
class SideSegments:
    """One side of a layer in a step: `sinks | packed | tail`, oldest first.

    `sinks` and `tail` are dense, `[B, H, T, D]`; `packed` is the number of tokens in `store` that belong to this step.
    """

    sinks: torch.Tensor
    store: PackedStore
    packed: int
    tail_buffer: torch.Tensor
    """`[B, H, room, D]`, of which the first `tail_tokens` are the tail; contiguous, but for that of a first prompt."""
    tail_tokens: int
    codec: Codec
    track: RopeTrack | None = None
    """cos and sin of all tokens, where the codec asks for them."""
    count: torch.Tensor | None = None
    """Where `packed` is room that may be partly empty: how many tokens are there, int64 `[]`."""

    @property
    def tail(self) -> torch.Tensor:
        return self.tail_buffer[:, :, : self.tail_tokens]

    def rope(self, start: int, stop: int) -> Rope | None:
        """cos and sin of packed tokens `[start, stop)`."""
        first = self.sinks.shape[2]
        return None if self.track is None else self.track.read(first + start, first + stop)

    @property
    def shape(self) -> torch.Size:
        batch, heads, sinks, dim = self.sinks.shape
        return torch.Size((batch, heads, sinks + self.packed + self.tail_tokens, dim))

    def dense(self) -> torch.Tensor:
        """Everything decoded, `[B, H, T, D]` in the model's dtype."""
        if not self.packed:
            return torch.cat([self.sinks, self.tail], dim=2)
        whole = self.tail_buffer.new_empty(self.shape)
        first = self.sinks.shape[2]
        whole[:, :, :first] = self.sinks
        self.decode_into(whole[:, :, first : first + self.packed], 0)
        whole[:, :, first + self.packed :] = self.tail
        return whole

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Packed tokens `[start, stop)`, whole groups, decoded in the model's dtype; the sinks before the first."""
        sinks = self.sinks[:, :, : None if start == 0 else 0]
        batch, heads, first, dim = sinks.shape
        tile = self.tail_buffer.new_empty(batch, heads, first + stop - start, dim)
        tile[:, :, :first] = sinks
        self.decode_into(tile[:, :, first:], start)
        return tile

    def decode_into(self, out: torch.Tensor, start: int) -> None:
        """Decodes packed tokens from `start` on, whole groups, into `out` `[B, H, tokens, D]`."""
        stop = start + out.shape[2]
        for begin in range(start, stop, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, stop)
            with on_device(out):
                part = self.codec.decode(self.store.read(begin, end), self.rope(begin, end))
            out[:, :, begin - start : end - start] = part


Way: TypeAlias = Backend | Literal["tiles"]
_ATTENTION: dict[Way, str] = {
    "triton": ".triton_kernels.launch",
    "cpp": ".cpu_kernels.launch",
    "torch": ".reference",
    "tiles": ".tiled",
}
"""Modules with a function `attend` each: that of the backends, and one for many queries."""


def _attention(way: Way) -> Callable[..., torch.Tensor]:
    return load_part(_ATTENTION[way]).attend


class PackedKV:
    """The keys or the values of one layer, compressed. Reports the logical shape; any other use decodes it first.

    `keys` and `values` are both of the layer's sides, whichever this object stands for: attention needs the two.
    A layer of fixed capacity has `room` tokens to anyone who asks.
    """

    __slots__ = ("backend", "keys", "room", "side", "values")

    def __init__(
        self, keys: SideSegments, values: SideSegments, side: Side, backend: Backend, room: int | None = None
    ) -> None:
        self.keys = keys
        self.values = values
        self.side = side
        self.backend = backend
        self.room = room

    def _segments(self) -> SideSegments:
        return self.keys if self.side == "keys" else self.values

    @property
    def shape(self) -> torch.Size:
        batch, heads, tokens, dim = self._segments().shape
        return torch.Size((batch, heads, self.room or tokens, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self._segments().tail_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self._segments().tail_buffer.device

    @property
    def ndim(self) -> int:
        return 4

    def dense(self) -> torch.Tensor:
        """This side decoded, `[B, H, T, D]`."""
        return self._segments().dense()

    def way(self, query: torch.Tensor, softcap: float | None) -> Way | None:
        """What attends to the layer without decoding all of it; None where nothing does, or where it is no gain."""
        if not self.keys.packed:
            return "torch"  # Codecs may not be prepared before they pack.
        short = query.shape[2] <= MAX_CPP_QUERIES and query.dtype == torch.float32 and self.values.codec.chunks_on_cpp
        if query.shape[2] <= MAX_DECODE_TOKENS or (self.backend == "cpp" and short):
            return self.backend
        tiled = load_part(".tiled")
        long = self.keys.packed > tiled.TILE_TOKENS or self.backend == "cpp"
        return "tiles" if long and tiled.suits(query, self.keys, self.values, softcap) else None

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of queries `[B, Hq, n, Dk]` over both sides, `[B, n, Hq, Dv]`; see `reference.attend`.

        `mask` may also be a flash attention's padding mask, `[B, T]`.
        """
        way = self.way(query, softcap) or self.backend
        if mask is not None and mask.ndim == 2 and way != "tiles":
            count, tokens = query.shape[2], self.keys.shape[2]
            causal = torch.ones(count, tokens, dtype=torch.bool, device=mask.device).tril(tokens - count)
            mask = causal & mask[:, None, None, -tokens:].bool()
        with on_device(query):
            return _attention(way)(query, self.keys, self.values, mask, scaling=scaling, softcap=softcap, sinks=sinks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.dense()[index]

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
        return f"PackedKV({self.side}, shape={tuple(self.shape)}, packed={self._segments().packed})"


def _decoding(name: str) -> Callable[..., Any]:
    def operator(view: PackedKV, *operands: Any) -> Any:
        return getattr(view.dense(), name)(*operands)

    return operator


# Python looks operators up on the class, where `__getattr__` has no say.
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
):
    setattr(PackedKV, f"__{_name}__", _decoding(f"__{_name}__"))
