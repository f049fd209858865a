"""Views of a layer of fixed capacity: which token lies in which slot, and attention over all slots under a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import load_part, on_device
from .codec import Backend, Side
from .view import PackedKV, SideSegments


@dataclass(frozen=True)
class Slots:
    """`sinks | capacity | ring`: numbers of slots, and the layer's own counters of tokens, int64 `[]`.

    Token `sinks + i` lies in slot `i` of the capacity once it is packed, and until then in slot `i % ring` of the ring.
    """

    sinks: int
    capacity: int
    ring: int
    room: int
    """Tokens that the layer takes."""
    length: torch.Tensor
    packed: torch.Tensor

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of the token in each slot, and whether it holds one, `[slots]`."""
        device = self.length.device
        newest = self.length - self.sinks - 1
        ring = newest - (newest - torch.arange(self.ring, device=device)) % self.ring
        first = torch.arange(self.sinks, device=device)
        packed = torch.arange(self.capacity, device=device)
        holds = torch.cat([first < self.length, packed < self.packed, ring >= self.packed])
        return torch.cat([first, packed + self.sinks, ring + self.sinks]), holds

    def mask(self, mask: torch.Tensor | None, count: int) -> torch.Tensor:
        """A mask over tokens, of the last `count` of them, as one over slots; it hides slots that hold no token.

        `mask` is None (causal), `[B or 1, Hq or 1, count, T]`, boolean or additive, or a padding mask `[B, T]`.
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


class SlotKV(PackedKV):
    """The keys or the values of a layer of fixed capacity; dense, it has `room` tokens, the last of them zero."""

    __slots__ = ("slots",)

    def __init__(self, keys: SideSegments, values: SideSegments, side: Side, backend: Backend, slots: Slots) -> None:
        super().__init__(keys, values, side, backend, slots.room)
        self.slots = slots

    def dense(self) -> torch.Tensor:
        tokens, holds = self.slots.tokens()
        batch, heads, room, dim = self.shape
        by_token = self._segments().tail_buffer.new_zeros(batch, heads, room + 1, dim)
        # A layer that was given too many on a GPU raises for them later, not here.
        by_token.index_copy_(2, torch.where(holds & (tokens < room), tokens, room), super().dense())
        return by_token[:, :, :room].contiguous()

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.way(query, softcap) != "triton":
            return super().attend(query, self.slots.mask(mask, query.shape[2]), scaling, softcap, sinks)
        with on_device(query):
            return load_part(".triton_kernels.launch").attend(
                query, self.keys, self.values, mask, scaling=scaling, softcap=softcap, sinks=sinks, slots=self.slots
            )
