"""Slots of a static layer: which token lies in which slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

    def mask(self, mask: torch.Tensor | None, count: int) -> torch.Tensor:
        """Turn a mask over tokens into one over slots, which hides slots without a token.

        Args:
            mask: None (causal), `[B or 1, Hq or 1, count, T]`, boolean or additive, or a padding mask `[B, T]`.
            count: queries, which are the last tokens.
        """
        tokens, holds = self.tokens()
        if mask is not None and mask.ndim == 4:
            mask = mask.index_select(-1, tokens.clamp(0, mask.shape[-1] - 1))
            return mask & holds if mask.dtype == torch.bool else mask.masked_fill(~holds, -torch.inf)
        queries = torch.arange(count, device=tokens.device)[:, None] + self.length - count
        causal = (holds & (tokens <= queries))[None, None]
        if mask is None:
            return causal
        return causal & mask.bool().index_select(-1, tokens.clamp(0, mask.shape[-1] - 1))[:, None, None]

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder slots `[B, H, slots, D]` by token: `[B, H, capacity, D]`, zero where there is no token."""
        tokens, holds = self.tokens()
        batch, heads, _, dim = x.shape
        # On a GPU a layer with too many tokens raises later: here the last row absorbs them.
        found = x.new_zeros(batch, heads, self.capacity + 1, dim)
        found.index_copy_(2, torch.where(holds & (tokens < self.capacity), tokens, self.capacity), x)
        return found[:, :, : self.capacity].contiguous()
