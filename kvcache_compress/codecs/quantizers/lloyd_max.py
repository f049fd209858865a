"""Scalar codebooks for the coordinates of random unit vectors (TurboQuant, section 3.1 and Lemma 1)."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import torch

from ..device import on_cpu

Integral: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_CELLS = 1 << 16


class _CoordinateDensity:
    """Density of one coordinate on the unit sphere; gives mass and first moment on `[0, x]`, float64.

    `f(x) = Γ(d/2) / (√π Γ((d-1)/2)) (1 - x²)^((d-3)/2)`
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.log_constant = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2) - 0.5 * math.log(math.pi)
        self.reach = min(1.0, 14.0 / math.sqrt(dim))
        # Substituting x = sin(t) gives cos(t)^(d-2), which has no singularity at |x| = 1 for small d.
        step = math.asin(self.reach) / _CELLS
        middles = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) * step
        self.step = step
        cells = torch.exp(self.log_constant + (dim - 2) * torch.log(torch.cos(middles))) * step
        self.cumulative = torch.cat([torch.zeros(1, dtype=torch.float64), cells.cumsum(0)])

    def mass(self, x: torch.Tensor) -> torch.Tensor:
        """Probability of `[0, x]`."""
        return interpolated(self.cumulative, torch.asin(x.clamp(0, self.reach)) / self.step)

    def moment(self, x: torch.Tensor) -> torch.Tensor:
        """`∫ t f(t) dt` over `[0, x]`, in closed form."""
        scale = math.exp(self.log_constant) / (self.dim - 1)
        return scale * (1 - (1 - x.clamp(0, 1).square()).pow((self.dim - 1) / 2))


@lru_cache(maxsize=256)
@on_cpu()
def lloyd_max_levels(dim: int, bits: int) -> torch.Tensor:
    """Levels of the best quantizer for one coordinate on the unit sphere, float64 `[2 ** bits]`.

    Its mean squared error is least. Levels ascend and are symmetric about zero. Times √dim they approach the Gaussian's
    levels (±.7979 at 1 bit).
    """
    density = _CoordinateDensity(dim)
    half = 2 ** (bits - 1)
    start = density.reach * 0.35 * (torch.arange(half, dtype=torch.float64) + 0.5) / half
    levels = lloyd(start, density.reach, density.mass, density.moment)
    return torch.cat([-levels.flip(0), levels])


def lloyd(levels: torch.Tensor, end: float, mass: Integral, moment: Integral) -> torch.Tensor:
    """Move `levels` between 0 and `end` to the best ones for a density with these integrals from 0 on."""
    ends = torch.tensor([0.0, end], dtype=torch.float64)
    for _ in range(20_000):
        edges = torch.cat([ends[:1], (levels[1:] + levels[:-1]) / 2, ends[1:]])
        before, levels = levels, moment(edges).diff() / mass(edges).diff().clamp_min(1e-300)
        if (levels - before).abs().max().item() < 1e-11:
            break
    return levels


def interpolated(cumulative: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Sums of the first `place` cells, a fraction among them, from the sums of 0, 1, … cells."""
    place = place.clamp(0, len(cumulative) - 1)
    low = place.floor().long().clamp(max=len(cumulative) - 2)
    return torch.lerp(cumulative[low], cumulative[low + 1], place - low)


@lru_cache(maxsize=256)
@on_cpu()
def uniform_levels(dim: int, bits: int) -> torch.Tensor:
    """Levels of the best uniform symmetric quantizer for one coordinate on the unit sphere, float64 `[2 ** bits]`."""
    density = _CoordinateDensity(dim)
    grid = torch.arange(2**bits, dtype=torch.float64) - (2**bits - 1) / 2

    def loss(step: float) -> float:
        levels = grid[grid > 0] * step
        edges = torch.cat([torch.zeros(1), (levels[1:] + levels[:-1]) / 2, torch.full((1,), density.reach)]).double()
        mass, moment = density.mass(edges).diff(), density.moment(edges).diff()
        return (mass * levels.square() - 2 * moment * levels).sum().item()

    low, high = 1e-3 / math.sqrt(dim), 3.0 / math.sqrt(dim)
    for _ in range(80):
        third = (high - low) / 3
        if loss(low + third) < loss(high - third):
            high -= third
        else:
            low += third
    return grid * (low + high) / 2


def outward(levels: torch.Tensor) -> torch.Tensor:
    """Reorder ascending levels to count from zero outwards, negative ones first; its own inverse.

    Code `c` and the code of `-levels[c]` then differ only in the top bit, so kernels look up magnitudes and take the
    sign from that bit.
    """
    negative, positive = levels.chunk(2)
    return torch.cat([negative.flip(0), positive])
