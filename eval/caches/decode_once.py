"""Caching of decoded tokens, for evaluations on machines where decoding dominates.

Packed tokens never change, so each needs to be decoded only once, not at every step. Keeping them decoded gives the
same numbers (to the rounding of float32) at the speed and in the memory of an uncompressed cache, which is of use to an
evaluation alone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields

import torch
from transformers import Cache

from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.storage.side import SideState
from kvcache_compress.storage.view import View


def decode_once(cache: Cache) -> None:
    """Make a filled cache keep what it decodes; it may no longer be copied, cropped or reordered."""
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            for state in layer.sides.values():
                # Its layer asks this very object for the view of each step.
                state.view = _Decoded(state).view  # type: ignore[method-assign]


class _Decoded:
    """The decoded packed tokens of one side, `[B, H, tokens, D]`."""

    def __init__(self, state: SideState) -> None:
        self.state: SideState = weakref.proxy(state)  # which holds this object, and all that is decoded
        self.packed = state.sinks[:, :, :0]

    def view(self, packed: int | None = None, tail: torch.Tensor | None = None) -> View:
        view = SideState.view(self.state, packed, tail)
        kept = _Kept(*(getattr(view, field.name) for field in fields(View)))
        kept.decoded = self
        return kept


@dataclass(slots=True, eq=False, repr=False)
class _Kept(View):
    decoded: _Decoded | None = None

    def stored(self) -> torch.Tensor:
        assert self.decoded is not None
        known = self.decoded.packed
        if (start := known.shape[2]) < self.packed:
            fresh = self.tail_buffer.new_empty(*known.shape[:2], self.packed - start, known.shape[3])
            self.decode_into(fresh, start)
            self.decoded.packed = torch.cat([known, fresh], dim=2)
        return torch.cat([self.sinks, self.decoded.packed[:, :, : self.packed], self.tail], dim=2)
