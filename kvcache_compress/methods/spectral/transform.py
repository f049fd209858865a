"""The spectral transform of keys, and the bits of its channels.

With K and Q the second moments of keys and queries, errors e of keys cost eᵀ Q e. In `y = Vᵀ Q^(1/2) x`, where V
diagonalises `Q^(1/2) K Q^(1/2)`, that cost is the squared error, and the channels are uncorrelated, with variances λ.
Bits go where they remove most (reverse water-filling, Cover and Thomas, section 10.3.3).
"""

from __future__ import annotations

import torch

CLASS = 8
"""Channels that share a bit width: each bit of eight codes is a byte."""
MOST_BITS = 6
PLAIN_SHARE = 0.1
"""Share of the plain moment of keys in K, so that keys that got no attention in calibration are coded too."""
LEAST_COST, LEAST_VARIANCE = 1e-4, 1e-7
"""Floors of the eigenvalues of Q and of the variances, relative to the largest."""
DISTORTION = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.0006442)
"""Mean squared error of the Lloyd-Max quantizer of a standard Gaussian with 0 to 6 bits (Max, 1960)."""


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


def allocate_bits(deviation: torch.Tensor, total: int) -> torch.Tensor:
    """Bits of each class of `CLASS` channels, int64 `[H, D / CLASS]`, which sum to `total` for every head.

    Greedy in the summed distortion that a bit removes. Not in the mean logarithm of a class's variances: the first
    channels tower over their class.
    """
    variance = deviation.double().square().unflatten(-1, (-1, CLASS)).sum(-1)
    bits = torch.zeros_like(variance, dtype=torch.long)
    removed = torch.tensor(DISTORTION, dtype=torch.float64, device=deviation.device)
    removed = torch.cat([removed[:-1] - removed[1:], removed.new_full((1,), -1.0)])
    for _ in range(total):
        best = (variance * removed[bits]).argmax(-1, keepdim=True)
        bits.scatter_add_(-1, best, torch.ones_like(best))
    return bits
