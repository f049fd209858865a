"""Segments of one side of a layer that a step attends to: `sinks | packed | tail`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from kvcache_compress.codecs.base import Codec
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.modeling.rope import Rope

from .packed_store import PackedStore
from .rope_track import RopeTrack
from .slots import Slots

DECODE_CHUNK_TOKENS = 2048
"""Packed tokens decoded at a time, a multiple of every group size."""


@dataclass(slots=True)
class SideSegments:
    """One side of a layer in a step: `sinks | packed | tail`, oldest first.

    `sinks` and `tail` are dense, `[B, H, T, D]`; `packed` is the number of tokens in `store` that belong to this step.
    """

    sinks: torch.Tensor
    store: PackedStore
    packed: int
    tail_buffer: torch.Tensor
    """`[B, H, capacity, D]`, of which the first `tail_tokens` are the tail; contiguous except in a first prompt."""
    tail_tokens: int
    codec: Codec
    track: RopeTrack | None = None
    """Cos and sin of the packed groups, if the codec needs them."""
    slots: Slots | None = None
    """Slots of a static layer, if the segments are all its slots, whether they hold a token or not."""
    padding: LeftPadding | None = None
    """Left padding of the rows, whose first tokens have changed places with it; None if there is none."""

    @property
    def tail(self) -> torch.Tensor:
        return self.tail_buffer[:, :, : self.tail_tokens]

    def rope(self, start: int, stop: int) -> Rope | None:
        """Return cos and sin of the groups of packed tokens `[start, stop)`, or None without a track."""
        return None if self.track is None else self.track.read(start, stop)

    @property
    def shape(self) -> torch.Size:
        batch, heads, sinks, dim = self.sinks.shape
        return torch.Size((batch, heads, sinks + self.packed + self.tail_tokens, dim))

    def own_dense(self) -> None:
        """Copy what the layer overwrites when tokens are added: dense tokens and the counters of slots."""
        self.sinks = self.sinks.clone()
        self.tail_buffer = self.tail_buffer.clone(memory_format=torch.contiguous_format)
        self.track = copy.copy(self.track)
        if self.slots is not None:
            self.slots = replace(self.slots, length=self.slots.length.clone(), packed=self.slots.packed.clone())

    def own_packed(self) -> None:
        """Copy the packed tokens, which the layer only overwrites after a crop, and their cos and sin."""
        self.store = copy.copy(self.store)
        self.store.apply(torch.clone)
        if self.track is not None:
            self.track.buffer = self.track.buffer.clone()

    def written(self, x: torch.Tensor, changed: torch.Tensor) -> SideSegments:
        """Return these segments with the dense tokens of `x` `[B, H, T, D]` where `changed`, in new buffers."""
        first, last = self.sinks.shape[2], self.sinks.shape[2] + self.packed
        sinks = torch.where(changed[:, :, :first], x[:, :, :first], self.sinks)
        tail = torch.where(changed[:, :, last:], x[:, :, last:], self.tail)
        return replace(self, sinks=sinks, tail_buffer=tail)

    def dense(self) -> torch.Tensor:
        """Decode all tokens in order, or all slots: `[B, H, T, D]` in the model's dtype."""
        first = self.sinks.shape[2]
        if not self.packed:
            whole = torch.cat([self.sinks, self.tail], dim=2)
        else:
            whole = self.tail_buffer.new_empty(self.shape)
            whole[:, :, :first] = self.sinks
            self.decode_into(whole[:, :, first : first + self.packed], 0)
            whole[:, :, first + self.packed :] = self.tail
        if self.padding is not None and self.slots is None:
            self.padding.exchange_(whole.mT, first)
        return whole

    def tile(self, start: int, stop: int) -> torch.Tensor:
        """Decode packed tokens `[start, stop)`, whole groups, to the model's dtype, with the sinks before the first."""
        sinks = self.sinks[:, :, : None if start == 0 else 0]
        batch, heads, first, dim = sinks.shape
        tile = self.tail_buffer.new_empty(batch, heads, first + stop - start, dim)
        tile[:, :, :first] = sinks
        self.decode_into(tile[:, :, first:], start)
        return tile

    def decode_into(self, out: torch.Tensor, start: int) -> None:
        """Decode packed tokens from `start` on, whole groups, into `out` `[B, H, tokens, D]`."""
        stop = start + out.shape[2]
        for begin in range(start, stop, DECODE_CHUNK_TOKENS):
            end = min(begin + DECODE_CHUNK_TOKENS, stop)
            with on_device(out):
                part = self.codec.decode(self.store.read(begin, end), self.rope(begin, end))
            out[:, :, begin - start : end - start] = part
