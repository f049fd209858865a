"""Measure queries per pair of channels, to weigh errors of a key's pairs, and the attention that tokens get.

A score is Σ_j Re(conj(q_j) k_j) over pairs j, so its expected squared error is Σ_j E|q_j|² |k_j - k̂_j|² / 2 if the
errors of pairs are independent of the queries. RoPE changes neither |q_j| nor |k_j - k̂_j|, so keys scaled per pair by
the root of E|q_j|² can be coded before RoPE like any others.

Softmax and output feel the error of a token's key by Σ p (1 - p) |q|² over the queries that pay it the attention p, and
that of its value by Σ p². This is what rounds are shared out by among heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_compress.modeling.calibration.observed_attention import RECENT, SINKS, attention_paid, observed_attention
from kvcache_compress.modeling.rope import RopeLayout

STEP = 8
"""One query in `STEP` is looked at for the attention that tokens get."""
SHARE = 0.9
"""Share of the measured costs in those of `token_costs`; the rest is the mean."""


@dataclass
class Observed:
    """Sums over the observed calls, by layer; empty for models that cannot be observed.

    squares: |q_j|² of queries over tokens and grouped heads, float64 `[H, pairs]`.
    costs: costs of errors of keys and of values, float32 `[2, H, tokens]`, one tensor per call.
    """

    squares: dict[int, torch.Tensor] = field(default_factory=dict)
    costs: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@contextmanager
def observed_queries(model: PreTrainedModel, layout: RopeLayout, costs_of: Collection[int]) -> Iterator[Observed]:
    """Observe the attention of every layer while open, for calls with one row; costs of the layers `costs_of` alone."""
    sums = Observed()

    def add(layer: int, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
        real, imaginary = layout.split(query.float())
        squares = (real.square() + imaginary.square()).double().sum((0, 2)).unflatten(0, (key.shape[1], -1)).sum(1)
        sums.squares[layer] = sums.squares[layer] + squares if layer in sums.squares else squares
        if layer in costs_of:
            sums.costs.setdefault(layer, []).append(token_costs(query[0], key[0], options).cpu())

    with observed_attention(model, add):
        yield sums


def token_costs(query: torch.Tensor, keys: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Costs of errors of keys and values, from queries `[Hq, T, D]` and keys `[H, T, D]`: float32 `[2, H, T]`.

    A tenth is the layer's mean cost, so that tokens which few of the sampled queries look at count too; without any
    attention between encoded tokens, as in short windows, all count alike.
    """
    at = torch.arange(query.shape[1], device=query.device)[SINKS + RECENT :: STEP]
    heads = keys.shape[0]
    query = query[:, at].float()
    aux = options.get("s_aux")
    paid = attention_paid(
        query, keys.repeat_interleave(len(query) // heads, 0), at, options.get("scaling") or query.shape[-1] ** -0.5,
        None if aux is None else aux[:, None].expand(-1, len(at)), softcap=options.get("softcap"),
    )  # fmt: skip
    lengths = query.square().sum(-1, keepdim=True)
    by_query = torch.stack([(paid - paid.square()) * lengths, paid.square()])
    costs = by_query.sum(2).unflatten(1, (heads, -1)).sum(2)
    mean = costs.mean((1, 2), keepdim=True)
    return torch.where(mean > 0, SHARE * costs + (1 - SHARE) * mean, 1.0)


def pair_weights(sums: torch.Tensor) -> torch.Tensor:
    """Weights `[H, pairs]` of pairs of keys: root mean squares, with mean square 1 within a head, exact in float16."""
    shares = sums / sums.mean(-1, keepdim=True).clamp_min(1e-30)
    return shares.clamp_min(1e-4).sqrt().half().float()
