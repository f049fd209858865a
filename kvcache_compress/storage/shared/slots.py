"""Slots of a static layer, and which token each holds."""

from dataclasses import dataclass

import torch


def slot_rows(batch: int, sinks: int, length: int, packed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """`Slots.rows` of a layer of `length` tokens."""
    first = min(sinks, length)
    return torch.tensor([[row, first, packed, length - first - packed] for row in range(batch)], device=device)


@dataclass(frozen=True)
class Slots:
    """Numbers of slots of `sinks | packed | tail`, and of tokens in them.

    Token `sinks + i` is in slot `i % tail_capacity` of the tail, and once packed in packed slot `i`.

    Args:
        sinks, packed_capacity, tail_capacity: numbers of slots.
        capacity: most tokens of the layer.
        rows: of each sequence, its row of the batch, and its sinks, packed and tail tokens, int64 `[B, 4]`.
    """

    sinks: int
    packed_capacity: int
    tail_capacity: int
    capacity: int
    rows: torch.Tensor

    @property
    def length(self) -> torch.Tensor:
        """Number of tokens, int64 `[]`."""
        return self.rows[0, 1:].sum()

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each slot's token index, and True for slots that hold a token, both `[slots]`."""
        device, length, filled = self.rows.device, self.length, self.rows[0, 2]
        newest = length - self.sinks - 1
        tail = newest - (newest - torch.arange(self.tail_capacity, device=device)) % self.tail_capacity
        first, packed = (torch.arange(count, device=device) for count in (self.sinks, self.packed_capacity))
        holds = torch.cat([first < length, packed < filled, tail >= filled])
        return torch.cat([first, packed + self.sinks, tail + self.sinks]), holds

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder slots `[B, H, slots, D]` by token: `[B, H, capacity, D]`, zero where there is no token."""
        tokens, holds = self.tokens()
        batch, heads, _, dim = x.shape
        # On a GPU an overfull layer raises later; until then the extra last row absorbs its tokens.
        found = x.new_zeros(batch, heads, self.capacity + 1, dim)
        found.index_copy_(2, torch.where(holds & (tokens < self.capacity), tokens, self.capacity), x)
        return found[:, :, : self.capacity].contiguous()
