"""Random rotations that spread a vector's energy evenly over its coordinates."""

from __future__ import annotations

from typing import Literal

import torch

RotationKind = Literal["hadamard", "haar"]


def random_rotation(kind: RotationKind, dim: int, seed: int) -> torch.Tensor:
    """A seeded random orthogonal matrix, float32 `[dim, dim]`; rotate row vectors with `x @ matrix.T`.

    `haar` is uniform over the orthogonal group: QR of a Gaussian matrix with R's diagonal made positive (TurboQuant,
    section 3.1). `hadamard` is random signs followed by a Walsh-Hadamard transform; where `dim` is no power of two,
    two block-diagonal transforms with a random permutation between them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # whatever the default device: the same numbers everywhere
        if kind == "haar":
            return haar(dim, generator).float()
        signs = _signs(dim, generator)
        block = _hadamard_blocks(dim)
        if dim & (dim - 1) == 0:
            return (block * signs).float()
        shuffle = torch.randperm(dim, generator=generator)
        return (block @ (block * signs)[shuffle]).float()


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """A Haar-distributed orthogonal matrix, float64 `[dim, dim]`."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def _signs(dim: int, generator: torch.Generator) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, (dim,), generator=generator, dtype=torch.float64) - 1.0


def _hadamard_blocks(dim: int) -> torch.Tensor:
    """Block-diagonal normalised Hadamard matrix with blocks of the largest power of two that divides `dim`."""
    size = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / size**0.5] * (dim // size))
