"""The spectral transform of keys, and the mean key at each position in a group.

With second moments K of keys and Q of queries, an error e of a key costs eᵀ Q e. In `y = Vᵀ Q^(1/2) x`, where V
diagonalises `Q^(1/2) K Q^(1/2)`, that cost is the squared error, and the channels are uncorrelated with variances λ.

The mean key before RoPE becomes another vector at each position in a group. Most pairs of channels rotate slowly, so
the table of these vectors has hardly more than `RANK` dimensions; the rest stays in the keys and is coded with them.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

RANK = 16
"""Rank of the table of mean keys. On SmolLM2 groups of 64 lose nothing measurable by it, groups of 128 .6 % of MSE."""
PLAIN_SHARE = 0.1
"""Share of the unweighted moment in K, so that keys without attention in calibration are coded too."""
LEAST_COST, LEAST_VARIANCE = 1e-4, 1e-7
"""Floors of the eigenvalues of Q and of the variances, relative to the largest."""


class Moments(NamedTuple):
    """Second moments of a layer's keys and queries `[H, D, D]`, float64; see `KeyMoments`."""

    keys: torch.Tensor
    plain: torch.Tensor
    queries: torch.Tensor


def spectral_basis(keys: torch.Tensor, plain: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoding basis `[H, D, D]`, `y = x @ basis`, and standard deviations `[H, D]` of y, descending; float64.

    The arguments are second moments `[H, D, D]`; see `KeyMoments`.
    """
    # Scaling to unit variance makes the floors below independent of the scale of keys: a model with keys times S and
    # queries divided by S computes the same attention.
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
    """Best factors of a table of mean keys `[H, group, D]`: float64 `[H, group, RANK]` and `[H, RANK, D]`."""
    left, singular, right = torch.linalg.svd(means.double(), full_matrices=False)
    missing = max(0, RANK - singular.shape[-1])
    places, rows = left[..., :RANK] * singular[..., None, :RANK], right[..., :RANK, :]
    return functional.pad(places, (0, missing)), functional.pad(rows, (0, 0, 0, missing))
