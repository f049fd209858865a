"""Moments of a layer's keys and queries, weighted by attention, from which the spectral transform follows.

A score error costs p (1 - p) in the softmax, where p is the attention that the query pays the key. So each key counts
with the sum of p (1 - p) over queries, and each query, seen from the anchor of the group that it attends to, with what
it pays there. Sinks and recent tokens are left out: they are not encoded. Plain averages would follow the many queries
that look at the sinks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.modeling.rope import Rope, RopeLayout

SINKS, RECENT = 16, 64
"""Tokens at the ends of a window that count as sinks and as recent ones."""
SAMPLED = 160
"""Query positions looked at per window."""


@dataclass
class KeyMoments:
    """Sums over windows of one layer, float64 on the CPU; all are linear, so windows add up.

    keys, plain: `[H, D, D]` second moments of anchored keys, weighted by attention and not.
    queries: `[H, D, D]` second moment of queries turned to the anchors of the groups that they attend to.
    weight, tokens: the totals that they are divided by, `[H]` and a number.
    """

    keys: torch.Tensor
    plain: torch.Tensor
    queries: torch.Tensor
    weight: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, heads: int, head_dim: int) -> KeyMoments:
        keys, plain, queries = torch.zeros(3, heads, head_dim, head_dim, dtype=torch.float64)
        return cls(keys, plain, queries, torch.zeros(heads, dtype=torch.float64))

    def add(
        self,
        query: torch.Tensor,
        anchored: torch.Tensor,
        weights: torch.Tensor,
        rope: tuple[RopeLayout, Rope] | None,
    ) -> None:
        """Add a window: sampled queries `[H, S, D]`, keys `[H, n, group, D]`, their `weights` `[H, S, n * group]`.

        rope: for models with RoPE its layout, and cos and sin of the groups' first tokens, `[1, n, rotary]`.
        """
        _, groups, size, _ = anchored.shape
        keys, by_key = anchored.flatten(1, 2).double(), weights.sum(1, keepdim=True).mT.double()
        self.keys += ((keys * by_key).mT @ keys).cpu()
        self.plain += (keys.mT @ keys).cpu()
        by_group = weights.unflatten(-1, (groups, size)).sum(-1)
        for index in range(groups):
            turned = query
            if rope is not None:
                layout, starts = rope
                cos, sin = (x[:, index : index + 1].expand(-1, query.shape[1], -1) for x in starts)
                turned = layout.rotate_query(query[None], (cos, sin))[0]
            turned = turned.double()
            self.queries += ((turned * by_group[..., index, None]).mT @ turned).cpu()
        self.weight += by_key.sum((1, 2)).cpu()
        self.tokens += groups * size


def attention_weights(
    query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, scaling: float, s_aux: torch.Tensor | None = None
) -> torch.Tensor:
    """p (1 - p) `[H, S, T]` that queries `[H, S, D]` at positions `at` `[S]` pay keys `[H, T, D]`; none to the ends.

    s_aux: learned logits `[H, S]` that join the softmax's denominator.
    """
    place = torch.arange(keys.shape[1], device=keys.device)
    scores = (query.float() @ keys.float().mT * scaling).masked_fill(place > at[:, None], -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float()[..., None]], -1)
    p = scores.softmax(-1)[..., : keys.shape[1]]
    coded = (place >= SINKS) & (at[:, None] - place >= RECENT)
    return (p - p.square()) * coded
