"""Random rotations that spread a vector's energy evenly over its coordinates, and the seeds of what is random."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch

RotationKind = Literal["haar", "hadamard"]
ROUNDS = 3
"""Of a Hadamard rotation. One sends a single channel to ±1/√d, and two to a grid as coarse as a codebook of 3 bits."""


def hashed_seed(*parts: int | str) -> int:
    """Seed for a generator of torch (which takes 32 bits), unrelated to that of any other `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


def random_rotation(kind: RotationKind, dim: int, seed: int) -> torch.Tensor:
    """A seeded random orthogonal matrix, float32 `[dim, dim]`; rotate row vectors with `x @ matrix.T`.

    `haar` is uniform over the orthogonal group: QR of a Gaussian matrix with R's diagonal made positive (TurboQuant,
    section 3.1), for which the theorems hold whatever the vector. `hadamard` comes near it without a factorization:
    three times random signs and a Walsh-Hadamard transform (block-diagonal where `dim` is no power of two), with
    random permutations between them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # whatever the default device: the same numbers everywhere
        if kind == "haar":
            return haar(dim, generator).float()
        block = _hadamard_blocks(dim)
        matrix = block * _signs(dim, generator)
        for _ in range(ROUNDS - 1):
            shuffle = torch.randperm(dim, generator=generator)
            matrix = (block * _signs(dim, generator)) @ matrix[shuffle]
        return matrix.float()


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
