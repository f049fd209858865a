"""Quantize points in polar coordinates: PolarQuant's codes of RoPE pairs (Wu et al., section 3.2)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import packing
from .constants import on_cpu


class PairCodes(NamedTuple):
    """Codes of a pair's angle and radius.

    angle_bits, radius_bits: bits of each.
    tokens: tokens of a group that shares the scale of a pair's radii; 0 if all tokens share it.
    steps: steps from zero to the largest radius of a scale.
    offset: position in its cell to which a code is decoded, 0 to 1.
    match: True if a factor per token makes up for the length that its key loses.
    """

    angle_bits: int
    radius_bits: int
    tokens: int
    steps: int
    offset: float
    match: bool


def radii(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """Radii of pairs, float32, rounded as in IEEE 754, so that kernels can compute the same numbers to the bit.

    Neither `hypot` nor torch's float32 square root will do: on some processors one in six is rounded wrongly, which
    puts the longest radius of a channel, itself a boundary, into the cell below. The root in float64 rounds correctly.
    """
    return (real * real + imaginary * imaginary).double().sqrt().float()


@on_cpu
def quarter_bounds(bits: int) -> torch.Tensor:
    """cos and sin of the lower boundaries of the cells in the first quarter turn, float32 `[2 ** (bits - 2), 2]`."""
    angles = torch.arange(2 ** (bits - 2), dtype=torch.float64) * (2 * math.pi / 2**bits)
    return torch.stack([angles.cos(), angles.sin()], -1).float()


def angle_codes(real: torch.Tensor, imaginary: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Codes of the angles of points, uint8 `[..., pairs]`: cells of past quarter turns, plus boundaries passed in this.

    An arctangent would round pairs on a boundary, which are common in 16-bit keys, differently on each device.
    """
    second, third = (imaginary > 0) & (real <= 0), (imaginary <= 0) & (real < 0)
    fourth = (imaginary < 0) & (real >= 0)
    u, v = real.abs(), imaginary.abs()
    turned = second | fourth
    u, v = torch.where(turned, v, u), torch.where(turned, u, v)
    u = torch.where(v > 0, u, 1.0)  # the angle of zero is zero
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
    """Bit planes of the angles of points, then of radii `steps`, in cells; all inputs float32 `[..., pairs]`.

    bounds: `quarter_bounds(angle_bits)`.
    """
    angle = angle_codes(real, imaginary, bounds)
    radius = steps.floor().clamp(0, 2**radius_bits - 1)
    return *packing.pack(angle, angle_bits), *packing.pack(radius, radius_bits)
