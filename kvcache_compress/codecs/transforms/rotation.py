"""Random rotations, which spread a vector's energy evenly over its coordinates."""

from __future__ import annotations

from typing import Literal

import torch

RotationKind = Literal["haar", "hadamard"]
ROUNDS = 3
"""Rounds of a Hadamard rotation. One maps a single channel to ±1/√d, two to a grid as coarse as a 3-bit codebook."""


def random_rotation(kind: RotationKind, dim: int, seed: int) -> torch.Tensor:
    """Seeded random orthogonal matrix, float32 `[dim, dim]`; rotate row vectors with `x @ matrix.T`.

    `haar` is uniform over the orthogonal group: QR of a Gaussian matrix with R's diagonal made positive (TurboQuant,
    section 3.1). The theorems hold for it with any vector. `hadamard` comes close without a factorization: three rounds
    of random signs and a Walsh-Hadamard transform (block-diagonal if `dim` is not a power of two), with random
    permutations in between.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # the same numbers for any default device
        if kind == "haar":
            return haar(dim, generator).float()
        block = _hadamard_blocks(dim)
        matrix = block * _signs(dim, generator)
        for _ in range(ROUNDS - 1):
            shuffle = torch.randperm(dim, generator=generator)
            matrix = (block * _signs(dim, generator)) @ matrix[shuffle]
        return matrix.float()


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """Haar-distributed orthogonal matrix, float64 `[dim, dim]`."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def _signs(dim: int, generator: torch.Generator) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, (dim,), generator=generator, dtype=torch.float64) - 1.0


def _hadamard_blocks(dim: int) -> torch.Tensor:
    """Block-diagonal normalised Hadamard matrix whose block size is the largest power of two that divides `dim`."""
    size = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / size**0.5] * (dim // size))
