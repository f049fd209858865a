"""Calling the C++ encoders, the twins of the methods' own `quantize`."""

from __future__ import annotations

from typing import get_args

import torch

from ..codec import Fields
from ..scalar import Scalar
from . import build

_SCALARS: tuple[Scalar, ...] = get_args(Scalar)


def quantize_levels(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """`scalar.quantize` for float32 `z` `[..., width]`: the same codes, scalars to one unit in the last place."""
    operator = build.operators().quantize_levels.default
    return tuple(operator(z.contiguous(), norm.contiguous(), levels, bits, _SCALARS.index(scalar)))


def quantize_groups(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, tokens: int, channels: int
) -> Fields:
    """`kivi.quantize` for float32 `x` `[B, H, T, D]`."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return tuple(build.operators().quantize_groups.default(x, scale, zero, bits, tokens, channels))


def quantize_pairs(turns: torch.Tensor, steps: torch.Tensor, angle_bits: int, radius_bits: int) -> Fields:
    """`polarquant_rope.quantize` for float32 `turns` and `steps` `[..., pairs]`."""
    operator = build.operators().quantize_pairs.default
    return tuple(operator(turns.contiguous(), steps.contiguous(), angle_bits, radius_bits))
