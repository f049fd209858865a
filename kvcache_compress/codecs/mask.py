"""An attention call as Transformers makes it: its queries, and the mask that says which tokens they see.

Attention, its tiles, statistics and the padding record ask the mask; only kernels read its numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from .padding import LeftPadding

SHARED_QUERIES = 16
"""Most queries of a reordered mask that is kept for the other layers of a step."""


@dataclass(slots=True)
class Mask:
    """Mask of an attention call, over its tokens.

    tensor: None if every query sees the tokens up to its own. `[B or 1, Hq or 1, n, T]`: boolean (True = sees) or added
        to the scores. `[B, T]`: flash attention's padding mask, with which queries see the real tokens up to their own.
    """

    tensor: torch.Tensor | None = None

    @staticmethod
    def supports(given: Any) -> bool:
        """True for None and tensors, False for block masks and the masks of other attention functions."""
        return given is None or isinstance(given, torch.Tensor)

    @property
    def is_by_query(self) -> bool:
        """True if the tensor has a row for each query, which replaces causality."""
        return self.tensor is not None and self.tensor.ndim == 4

    def trimmed(self, tokens: int) -> Mask:
        """Mask over the first `tokens` tokens: a static cache's masks go on to its capacity."""
        return self if self.tensor is None else Mask(self.tensor[..., :tokens])

    def by_query(self, count: int, tokens: int) -> Mask:
        """The same mask, None or with a row for each of `count` queries, which are the last of `tokens` tokens."""
        if self.tensor is None or self.is_by_query:
            return self
        return Mask(self.spelled_out(count, tokens, self.tensor.device))

    def spelled_out(
        self, count: int, tokens: int, device: torch.device, length: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tensor `[B or 1, Hq or 1, count, tokens]`; `length`, int64 `[]`, is the number of tokens if not `tokens`."""
        mask = self.tensor
        if mask is not None and mask.ndim == 4:
            return mask
        last = torch.arange(count, device=device)[:, None] + (tokens if length is None else length) - count
        causal = (torch.arange(tokens, device=device) <= last)[None, None]
        if mask is None:
            return causal
        if mask.shape[1] < tokens:  # a static cache's may end with the last token written
            mask = functional.pad(mask, (0, tokens - mask.shape[1]))
        return causal & mask[:, None, None, -tokens:].bool()

    def applied(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[B, Hq, n, T]` of the last n of T tokens, -inf or lower where the mask hides a token."""
        count, tokens = scores.shape[-2:]
        if self.tensor is None and count == 1:
            return scores
        mask = self.spelled_out(count, tokens, scores.device)
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()

    def tile(
        self, rows: slice, begin: int, end: int, count: int, tokens: int, device: torch.device
    ) -> torch.Tensor | None:
        """Mask of some of `count` queries over tokens `[begin, end)` of `tokens`; None if they see all of these."""
        mask = self.tensor
        if mask is not None and mask.ndim == 4:
            return mask.expand(-1, -1, count, tokens)[:, :, rows, begin:end]
        # The last token that the first of these queries sees is its own.
        first, size = tokens - count + rows.start, rows.stop - rows.start
        causal = None
        if end > first + 1:
            causal = torch.ones(size, end - begin, dtype=torch.bool, device=device).tril(first - begin)[None, None]
        if mask is None:
            return causal
        padding = mask[:, None, None, -tokens:][..., begin:end].bool()
        return padding.expand(-1, -1, size, -1) if causal is None else padding & causal

    def exchanged(
        self,
        padding: LeftPadding,
        sinks: int,
        count: int,
        tokens: int,
        device: torch.device,
        length: torch.Tensor | None = None,
    ) -> Mask:
        """The mask in the order in which left-padded rows store their tokens, with a row for each query.

        `sinks` is the number of sinks; all else as in `spelled_out`. All layers of a step share the result.
        """
        given = self.tensor
        mask = self.spelled_out(count, tokens, device, length)
        if given is not mask or mask.is_inference() or count > SHARED_QUERIES:
            return Mask(padding.exchanged(mask, sinks))
        how = sinks, mask._version
        if padding.last is None or padding.last[0] is not mask or padding.last[1] != how:
            padding.last = mask, how, padding.exchanged(mask, sinks)
        return Mask(padding.last[2])

    def reordered(self, tokens: torch.Tensor, holds: torch.Tensor, count: int, length: torch.Tensor) -> Mask:
        """The mask over slots, with a row for each of `count` queries, which are the last of `length` tokens.

        Slot i has token `tokens[i]` where `holds[i]`, and is hidden elsewhere.
        """
        mask = self.tensor
        if mask is not None:
            mask = mask.index_select(-1, tokens.clamp(0, mask.shape[-1] - 1))
            if mask.ndim == 4:
                return Mask(mask & holds if mask.dtype == torch.bool else mask.masked_fill(~holds, -torch.inf))
        last = torch.arange(count, device=tokens.device)[:, None] + length - count
        causal = (holds & (tokens <= last))[None, None]
        return Mask(causal if mask is None else causal & mask.bool()[:, None, None])

    def of_queries(
        self, row: int, at: torch.Tensor, count: int, tokens: int, padding: LeftPadding | None, sinks: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Mask of one row's queries at positions `at`, `[Hq or 1, R, T]`, and the tokens that any of them sees, `[T]`.

        Both are over stored tokens; None for no mask. `count` queries, the last of `tokens` tokens, were seen.
        """
        if self.tensor is None:
            return None, None
        mask = self.tensor[min(row, len(self.tensor) - 1)]
        if mask.ndim == 1:
            mask = mask[None, None, -tokens:].bool()
        else:  # the last query comes on top: it sees all tokens but padding
            mask = torch.cat([mask[:, at - (tokens - count)], mask[:, -1:]], 1)
        if padding is not None:
            mask = padding.row(row).exchange_(mask[None].clone(), sinks)[0]
        if not self.is_by_query:
            return mask, mask[0, 0]
        return mask[:, :-1], sees(mask).flatten(0, 1).any(0)

    def first_rows(self, count: int) -> Mask:
        """The mask of the first `count` rows of the batch."""
        return self if self.tensor is None else Mask(self.tensor[:count])


def sees(mask: torch.Tensor) -> torch.Tensor:
    """True where a boolean or additive mask lets a query see a token."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def left_padding(given: Any) -> tuple[torch.Tensor, int] | None:
    """Number of padding tokens at the start of each row, int64 `[B]`, and the length `T` of a model's attention mask.

    Padding is a token that no query sees. Masks that are not tensors give None.
    """
    if isinstance(given, Mapping):
        given = given.get("full_attention")
    if not isinstance(given, torch.Tensor) or given.ndim not in (2, 4) or not given.numel():
        return None
    seen = sees(given).flatten(1, 2).any(1) if given.ndim == 4 else given != 0
    return (seen.cumsum(-1) == 0).sum(-1), seen.shape[-1]


@dataclass(slots=True)
class AttentionCall:
    """Queries of a layer, and how they attend.

    query: `[B, Hq, n, D]`, of the last n tokens.
    mask: over the layer's tokens in their order; back ends get it over stored tokens.
    scaling: factor on the inner products.
    softcap: if not None, scores are `softcap * tanh(s / softcap)` (Gemma 2).
    s_aux: learned logits `[Hq]` that join the softmax's denominator (gpt-oss).
    """

    query: torch.Tensor
    mask: Mask
    scaling: float
    softcap: float | None = None
    s_aux: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        mask: Any = None,
        *,
        scaling: float,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> AttentionCall:
        """Make a call with a mask as Transformers hands it over; one that is not supported counts as None."""
        return cls(query, Mask(mask if Mask.supports(mask) else None), scaling, softcap, s_aux)

    def first_rows(self, count: int) -> AttentionCall:
        """The call of the first `count` rows of the batch."""
        return replace(self, query=self.query[:count], mask=self.mask.first_rows(count))
