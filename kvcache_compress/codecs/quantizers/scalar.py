"""Scalar quantization of unit vectors with a codebook, and the one scalar stored per vector."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from .. import packing
from ..base import Fields

Scalar = Literal["norm", "match", "unbiased"]
SCALE_MAX = torch.finfo(torch.float16).max
SEARCHED = tuple((26 + 3 * i) / 32 for i in range(5))
"""Scales tried for each vector, as fractions of its own. Their low bits are zero, so products are equal on all back
ends."""
SEARCH_STEPS = 256
"""Integer units per standard deviation of a coordinate, for comparing the scales exactly."""


@dataclass(frozen=True)
class Component:
    """One scalar-quantized component: `width` codes of `bits` bits along rows `[start, start + width)` of the basis."""

    bits: int
    width: int
    start: int
    channel_set: int
    sketch: bool
    levels: torch.Tensor
    """float32 on the device: `[2 ** bits]` in the order of their codes, or `[2 ** (bits + 1)]` of a trellis."""
    table: torch.Tensor
    """Table of the levels for `packing.look_up`; of a trellis, the levels themselves."""
    even: bool
    """True if levels are evenly spaced."""
    trellis: bool

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.width)


def quantize(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """Pack the nearest levels of unit vectors `z` `[..., width]`, and store one scalar per vector in 16 bits.

    `levels` `[2 ** bits]` are in the order of their codes: ascending, or reordered by `lloyd_max.outward`. For a vector
    x = norm · z with code point ẑ the scalar is, by `scalar`:

    - `norm`: norm
    - `match`: norm / ‖ẑ‖
    - `unbiased`: norm ⟨z, z⟩ / ⟨z, ẑ⟩

    Except for `norm`, the codes are those of t · z with the t in `SEARCHED` that brings ẑ closest to the direction of z
    (as in RaBitQ's extension, Gao et al. 2024).
    """
    order, bounds = levels.argsort(), boundaries(levels)
    codes = order[torch.bucketize(z.contiguous(), bounds)]
    if scalar != "norm" and bits > 1:
        steps = SEARCH_STEPS * math.sqrt(z.shape[-1])
        units, level_units = (z * steps).nan_to_num(0).long(), (levels * steps).long()
        best: torch.Tensor | None = None
        for factor in SEARCHED:
            tried = order[torch.bucketize(z * factor, bounds)]
            point = level_units[tried]
            cross, square = ((x * point).sum(-1).double() for x in (units, point))
            closeness = cross * cross / square
            better = closeness > (-1.0 if best is None else best)
            best = closeness if best is None else torch.where(better, closeness, best)
            codes = torch.where(better[..., None], tried, codes)
    return (*packing.pack(codes, bits), stored_scalar(z, levels[codes], norm, scalar))


def stored_scalar(z: torch.Tensor, point: torch.Tensor, norm: torch.Tensor, scalar: Scalar) -> torch.Tensor:
    """Stored scalar, float16 `[...]`, of vectors `norm` `[...]` times `z` `[..., width]` with code points `point`."""
    if scalar == "match":
        norm = norm / point.norm(dim=-1)
    elif scalar == "unbiased":
        norm = norm * z.square().sum(-1) / (z * point).sum(-1).clamp_min(1e-12)
    return norm.clamp(max=SCALE_MAX).to(torch.float16)


def boundaries(levels: torch.Tensor) -> torch.Tensor:
    """Decision boundaries: a value above exactly i of them maps to level i. Levels may come in any order."""
    levels = levels.sort().values
    return (levels[1:] + levels[:-1]) / 2
