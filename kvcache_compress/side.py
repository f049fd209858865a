"""Keys or values of one layer: the codec and its three segments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .backend import on_device
from .codec import Backend, Codec
from .rope import Rope, RopeTrack
from .store import PackedStore, TailBuffer
from .view import SideSegments

CHUNK_TOKENS = 4096
"""Tokens encoded at a time, so that a long prompt needs little memory beside itself; a multiple of every group."""


class SideState:
    """`sinks | packed | tail` of one side."""

    def __init__(self, codec: Codec, like: torch.Tensor, tail_capacity: int, track: RopeTrack | None) -> None:
        self.codec = codec
        self.track = track
        self.sinks = like.new_empty(*like.shape[:2], 0, like.shape[3])
        self.store = PackedStore(codec.fields, like.shape[0], like.shape[1], like.device)
        self.tail = TailBuffer(like, tail_capacity)
        self.prepared = False

    def pack(self, x: torch.Tensor, tokens: int, backend: Backend, growing: bool) -> None:
        """Encodes the first `tokens` of `x` into the store; what depends on data is set from all of the first `x`."""
        if not self.prepared:
            self.codec.prepare(x)
            self.prepared = True
        self.store.reserve(tokens, growing)
        for start in range(0, tokens, CHUNK_TOKENS):
            part = x[:, :, start : min(start + CHUNK_TOKENS, tokens)]
            count, done = part.shape[2], self.store.tokens
            with on_device(part):
                encoded = self.codec.encode(part, self._rope(done, done + count), backend)
            self.store.append(encoded, count, growing)

    def _rope(self, start: int, stop: int) -> Rope | None:
        first = self.sinks.shape[2]
        return None if self.track is None else self.track.read(first + start, first + stop)

    def segments(self, packed: int, tail: torch.Tensor) -> SideSegments:
        return SideSegments(self.sinks, self.store, packed, tail, self.codec, self.track)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.sinks = change(self.sinks)
        self.store.apply(change)
        self.tail.apply(change)

    def crop(self, sinks: int, packed: int, group: int) -> None:
        """Keeps the first `sinks` and `packed` tokens; a group that is cut is decoded back into the tail."""
        whole = packed // group * group
        cut = self.tail.buffer
        if packed > whole:
            cut = self.codec.decode(self.store.read(whole, whole + group), self._rope(whole, whole + group))
        self.tail.replace(cut[:, :, : packed - whole].to(self.tail.buffer.dtype))
        self.store.truncate(whole)
        self.sinks = self.sinks[:, :, :sinks]
