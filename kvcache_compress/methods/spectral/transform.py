"""The spectral transform of keys, and their mean at each place in a group.

With K and Q the second moments of keys and queries, errors e of keys cost eᵀ Q e. In `y = Vᵀ Q^(1/2) x`, where V
diagonalises `Q^(1/2) K Q^(1/2)`, that cost is the squared error, and the channels are uncorrelated, with variances λ.

The mean key before RoPE is another vector at each place in a group. The table of these vectors has nearly no more than
`RANK` dimensions, since most pairs of channels turn slowly; the rest stays in the keys, and is coded with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

RANK = 16
"""Rank of the table of means: for SmolLM2 groups of 64 lose nothing measurable by it, groups of 128 .6 % of MSE."""
PLAIN_SHARE = 0.1
"""Share of the plain moment of keys in K, so that keys that got no attention in calibration are coded too."""
LEAST_COST, LEAST_VARIANCE = 1e-4, 1e-7
"""Floors of the eigenvalues of Q and of the variances, relative to the largest."""


class Moments(NamedTuple):
    """Second moments of a layer's keys and queries `[H, D, D]`, float64; see `KeyMoments`."""

    keys: torch.Tensor
    plain: torch.Tensor
    queries: torch.Tensor


def spectral_basis(keys: torch.Tensor, plain: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoding basis `[H, D, D]`, `y = x @ basis`, and standard deviations `[H, D]` of y, descending; float64.

    Args:
        keys, plain, queries: second moments `[H, D, D]`, see `KeyMoments`.
    """
    # Channels of unit variance: the floors below then mean the same for a model whose keys are scaled by any S and
    # queries by 1 / S, which computes the same.
    unit = plain.double().diagonal(dim1=-2, dim2=-1).clamp_min(1e-30).sqrt()
    scales = unit[:, :, None] * unit[:, None]
    moment = ((1 - PLAIN_SHARE) * keys.double() + PLAIN_SHARE * plain.double()) / scales
    cost, axes = torch.linalg.eigh(queries.double() * scales)
    cost = cost.clamp_min(cost.amax(-1, keepdim=True) * LEAST_COST).clamp_min(1e-30)
    root = (axes * cost.sqrt()[:, None]) @ axes.mT
    variance, vectors = torch.linalg.eigh(root @ moment @ root)
    variance = variance.clamp_min(variance.amax(-1, keepdim=True) * LEAST_VARIANCE).clamp_min(1e-30)
    return (root @ vectors).flip(-1) / unit[..., None], variance.sqrt().flip(-1)


def mean_table(means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best factors of a table of means `[H, group, D]`: `[H, group, RANK]` and `[H, RANK, D]`, float64, zero-padded."""
    left, singular, right = torch.linalg.svd(means.double(), full_matrices=False)
    missing = max(0, RANK - singular.shape[-1])
    places, rows = left[..., :RANK] * singular[..., None, :RANK], right[..., :RANK, :]
    return functional.pad(places, (0, missing)), functional.pad(rows, (0, 0, 0, missing))
