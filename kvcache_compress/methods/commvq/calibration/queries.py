"""Measure queries per pair of channels, to weigh the errors of a key's pairs by their cost.

A score is Σ_j Re(conj(q_j) k_j) over pairs j, so its expected squared error is Σ_j E|q_j|² |k_j - k̂_j|² / 2 if the
errors of pairs are independent of the queries. RoPE changes neither |q_j| nor |k_j - k̂_j|, so keys scaled per pair by
the root of E|q_j|² can be coded before RoPE like any others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_compress.modeling.calibration.observed_attention import observed_attention
from kvcache_compress.modeling.rope import RopeLayout


@contextmanager
def observed_queries(model: PreTrainedModel, layout: RopeLayout) -> Iterator[dict[int, torch.Tensor]]:
    """Sum |q_j|² of every layer's queries over tokens and grouped heads while open: float64 `[H, pairs]` by layer.

    The sums stay empty for models that cannot be observed.
    """
    sums: dict[int, torch.Tensor] = {}

    def add(layer: int, query: torch.Tensor, key: torch.Tensor, _: Any) -> None:
        real, imaginary = layout.split(query.float())
        squares = (real.square() + imaginary.square()).double().sum((0, 2)).unflatten(0, (key.shape[1], -1)).sum(1)
        sums[layer] = sums[layer] + squares if layer in sums else squares

    with observed_attention(model, add):
        yield sums


def pair_weights(sums: torch.Tensor) -> torch.Tensor:
    """Weights `[H, pairs]` of pairs of keys: root mean squares, with mean square 1 within a head, exact in float16."""
    shares = sums / sums.mean(-1, keepdim=True).clamp_min(1e-30)
    return shares.clamp_min(1e-4).sqrt().half().float()
