"""Random rotations, which spread a vector's energy evenly over its coordinates."""

import torch


def random_rotation(dim: int, seed: int) -> torch.Tensor:
    """Seeded random orthogonal matrix, float32 `[dim, dim]`; rotate row vectors with `x @ matrix.T`.

    It is uniform over the orthogonal group (TurboQuant, section 3.1), so the theorems hold for any vector.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # the same numbers for any default device
        return haar(dim, generator).float()


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """Haar-distributed orthogonal matrix, float64 `[dim, dim]`: QR of a Gaussian matrix, R's diagonal made positive."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()
