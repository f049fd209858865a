"""Attention calls from Transformers: queries, and the mask that says which tokens they see.

Everything but the kernels asks `Mask` instead of reading the mask's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from .padding import LeftPadding

SHARED_QUERIES = 16
"""Most queries for which a step's swapped mask is kept for its other layers."""


@dataclass(slots=True)
class Mask:
    """Mask of an attention call, over its tokens.

    Attributes:
        tensor: None if every query sees the tokens up to its own. `[B or 1, Hq or 1, n, T]`: boolean (True = sees) or
            added to the scores. `[B, T]`: flash attention's padding mask; queries see the real tokens up to their own.
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
        """Mask over the first `tokens` tokens; masks of static caches extend to the capacity."""
        return self if self.tensor is None else Mask(self.tensor[..., :tokens])

    def by_query(self, count: int, tokens: int) -> Mask:
        """The same mask with a row for each of `count` queries, the last of `tokens` tokens; None stays None."""
        if self.tensor is None or self.is_by_query:
            return self
        return Mask(self.spelled_out(count, tokens, self.tensor.device))

    def spelled_out(
        self, count: int, tokens: int, device: torch.device, length: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mask as a tensor `[B or 1, Hq or 1, count, tokens]`.

        The `count` queries are the last of `tokens` tokens, or of `length` (int64 `[]`) if that is given.
        """
        mask = self.tensor
        if mask is not None and mask.ndim == 4:
            return mask
        last = torch.arange(count, device=device)[:, None] + (tokens if length is None else length) - count
        causal = (torch.arange(tokens, device=device) <= last)[None, None]
        if mask is None:
            return causal
        if mask.shape[1] < tokens:  # masks of static caches may end at the last token written
            mask = functional.pad(mask, (0, tokens - mask.shape[1]))
        return causal & mask[:, None, None, -tokens:].bool()

    def applied(self, scores: torch.Tensor) -> torch.Tensor:
        """Mask the scores `[B, Hq, n, T]` of the last n of T tokens; hidden tokens get -inf or very low scores."""
        count, tokens = scores.shape[-2:]
        if self.tensor is None and count == 1:
            return scores
        mask = self.spelled_out(count, tokens, scores.device)
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()

    def tile(
        self, rows: slice, begin: int, end: int, count: int, tokens: int, device: torch.device
    ) -> torch.Tensor | None:
        """Mask for some of `count` queries over tokens `[begin, end)` of `tokens`; None if they see all of these."""
        mask = self.tensor
        if mask is not None and mask.ndim == 4:
            return mask.expand(-1, -1, count, tokens)[:, :, rows, begin:end]
        # `first` is the last token that the first of these queries sees: its own.
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

        `sinks` is the number of sinks; the other arguments are as in `spelled_out`. All layers of a step share the
        result, but not those of a static step, which may keep no memory of a CUDA graph.
        """
        given = self.tensor
        mask = self.spelled_out(count, tokens, device, length)
        if given is not mask or mask.is_inference() or count > SHARED_QUERIES or length is not None:
            return Mask(padding.exchanged(mask, sinks))
        how = sinks, mask._version
        if padding.last is None or padding.last[0] is not mask or padding.last[1] != how:
            padding.last = mask, how, padding.exchanged(mask, sinks)
        return Mask(padding.last[2])

    def reordered(self, tokens: torch.Tensor, holds: torch.Tensor, count: int, length: torch.Tensor) -> Mask:
        """The mask over slots, a row per query: the queries are the last `count` of `length` tokens.

        Slot i holds token `tokens[i]` if `holds[i]`; other slots are hidden.
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
        """Mask of one batch row's queries at positions `at`, `[Hq or 1, R, T]`, and the tokens any of them sees, `[T]`.

        Both are over stored tokens and None without a mask. The last `count` of `tokens` tokens have queries.
        """
        if self.tensor is None:
            return None, None
        mask = self.tensor[min(row, len(self.tensor) - 1)]
        if mask.ndim == 1:
            mask = mask[None, None, -tokens:].bool()
        else:  # append the last query, which sees all tokens except padding
            mask = torch.cat([mask[:, at - (tokens - count)], mask[:, -1:]], 1)
        if padding is not None:
            own = padding.changed(lambda tokens: tokens[row : row + 1])
            mask = own.exchange_(mask[None].clone(), sinks)[0]
        if not self.is_by_query:
            return mask, mask[0, 0]
        return mask[:, :-1], sees(mask).flatten(0, 1).any(0)


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

    Attributes:
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
    def of(cls, query: torch.Tensor, mask: Any = None, **options: Any) -> AttentionCall:
        """Make a call with a mask as Transformers passes it; an unsupported mask counts as None."""
        return cls(query, Mask(mask if Mask.supports(mask) else None), **options)

    def first_rows(self, count: int) -> AttentionCall:
        mask = self.mask.tensor
        return replace(self, query=self.query[:count], mask=Mask(None if mask is None else mask[:count]))
