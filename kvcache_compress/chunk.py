"""What is attended to in a layer of fixed capacity that is not frozen: tokens that are there, under masks over more."""

from __future__ import annotations

import torch

from .view import MAX_DECODE_TOKENS, PackedKV, Way


class ChunkKV(PackedKV):
    """The keys or the values of a chunk of a prompt, or on a CPU of a step, and of all tokens before it.

    Transformers makes masks over all the room of such a layer, so that is the shape; dense, tokens that are not there
    yet are zero. Attention reads the others, under the part of the mask that is theirs. Those of a first prompt are the
    tensors that were given.
    """

    __slots__ = ()

    def dense(self) -> torch.Tensor:
        there = super().dense()
        return torch.nn.functional.pad(there, (0, 0, 0, self.shape[2] - there.shape[2]))

    def there(self, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values of the tokens that are there, decoded, and the mask over them."""
        return self.keys.dense(), self.values.dense(), self._over_tokens(mask)

    def way(self, query: torch.Tensor, softcap: float | None) -> Way | None:
        """As in the base class; None for a chunk while all is dense, which the model's own attention is faster for."""
        return super().way(query, softcap) if self.keys.packed or query.shape[2] <= MAX_DECODE_TOKENS else None

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        return super().attend(query, self._over_tokens(mask), scaling, softcap, sinks)

    def _over_tokens(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """A mask over the room, `[B, T]` or `[B or 1, Hq or 1, n, T]`, without the room that is left."""
        return None if mask is None else mask[..., : self.keys.shape[2]]
