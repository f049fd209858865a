"""Quantize points in polar coordinates: PolarQuant's codes of RoPE pairs (Wu et al., section 3.2)."""

import math
from typing import NamedTuple

import torch

from .. import packing
from ..device import on_cpu


class PairCodes(NamedTuple):
    """Coding of a pair by its angle and its radius.

    Attributes:
        angle_bits: bits of the angle.
        radius_bits: bits of the radius.
        tokens: tokens per group that shares the scale of a pair's radii; 0 if all tokens share it.
        steps: the largest radius in units of its scale.
        offset: position within its cell that a code decodes to, 0 to 1.
        match: True if each token stores a factor that restores its key's norm.
    """

    angle_bits: int
    radius_bits: int
    tokens: int
    steps: int
    offset: float
    match: bool


def radii(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """Radii of pairs, float32, rounded as in IEEE 754 so that kernels can reproduce them to the bit.

    `hypot` and torch's float32 square root are wrongly rounded for one radius in six on some processors. That would put
    a channel's longest radius, itself a boundary, into the cell below. The float64 root rounds correctly.
    """
    return (real * real + imaginary * imaginary).double().sqrt().float()


@on_cpu()
def quarter_bounds(bits: int) -> torch.Tensor:
    """cos and sin of the lower cell boundaries in the first quadrant, float32 `[2 ** (bits - 2), 2]`."""
    angles = torch.arange(2 ** (bits - 2), dtype=torch.float64) * (2 * math.pi / 2**bits)
    return torch.stack([angles.cos(), angles.sin()], -1).float()


def angle_codes(real: torch.Tensor, imaginary: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Angle codes of points, uint8 `[..., pairs]`: cells of earlier quadrants plus boundaries crossed in the point's.

    No arctangent: devices would round it differently on a boundary, where 16-bit keys often lie.
    """
    second, third = (imaginary > 0) & (real <= 0), (imaginary <= 0) & (real < 0)
    fourth = (imaginary < 0) & (real >= 0)
    u, v = real.abs(), imaginary.abs()
    turned = second | fourth
    u, v = torch.where(turned, v, u), torch.where(turned, u, v)
    u = torch.where(v > 0, u, 1.0)  # a point at the origin gets angle 0
    codes = second.to(torch.uint8)
    codes = (codes + 2 * third.to(torch.uint8) + 3 * fourth.to(torch.uint8)) * len(bounds)
    for cos, sin in bounds[1:]:
        codes += v * cos >= u * sin
    return codes


def quantize(
    real: torch.Tensor,
    imaginary: torch.Tensor,
    steps: torch.Tensor,
    bounds: torch.Tensor,
    angle_bits: int,
    radius_bits: int,
) -> tuple[torch.Tensor, ...]:
    """Bit planes of the points' angles, then of their radii.

    `real`, `imaginary` and `steps`, the radii in units of their scale, are float32 `[..., pairs]`; `bounds` is
    `quarter_bounds(angle_bits)`.
    """
    angle = angle_codes(real, imaginary, bounds)
    radius = steps.floor().clamp(0, 2**radius_bits - 1)
    return *packing.pack(angle, angle_bits), *packing.pack(radius, radius_bits)
