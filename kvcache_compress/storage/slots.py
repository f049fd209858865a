"""Slots of a static layer: which token lies in which slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.codecs.mask import Mask


@dataclass(frozen=True)
class Slots:
    """Numbers of slots of `sinks | packed | tail`, and the layer's own counters of tokens.

    Token `sinks + i` lies in slot `i % tail_capacity` of the tail, and once packed in slot `i` of the packed ones.

    Args:
        sinks, packed_capacity, tail_capacity: numbers of slots.
        capacity: most tokens of the layer.
        length, packed: its tokens and packed tokens, int64 `[]`.
    """

    sinks: int
    packed_capacity: int
    tail_capacity: int
    capacity: int
    length: torch.Tensor
    packed: torch.Tensor

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of each slot's token, and True for slots that hold one, both `[slots]`."""
        device = self.length.device
        newest = self.length - self.sinks - 1
        tail = newest - (newest - torch.arange(self.tail_capacity, device=device)) % self.tail_capacity
        first = torch.arange(self.sinks, device=device)
        packed = torch.arange(self.packed_capacity, device=device)
        holds = torch.cat([first < self.length, packed < self.packed, tail >= self.packed])
        return torch.cat([first, packed + self.sinks, tail + self.sinks]), holds

    def mask(self, mask: Mask, count: int) -> Mask:
        """Mask over slots of `count` queries, the last tokens, from a mask over tokens."""
        tokens, holds = self.tokens()
        return mask.reordered(tokens, holds, count, self.length)

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder slots `[B, H, slots, D]` by token: `[B, H, capacity, D]`, zero where there is no token."""
        tokens, holds = self.tokens()
        batch, heads, _, dim = x.shape
        # On a GPU a layer with too many tokens raises later: here the last row absorbs them.
        found = x.new_zeros(batch, heads, self.capacity + 1, dim)
        found.index_copy_(2, torch.where(holds & (tokens < self.capacity), tokens, self.capacity), x)
        return found[:, :, : self.capacity].contiguous()
