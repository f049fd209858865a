"""Call the C++ encoders, twins of the `quantize` functions in torch."""

import math
from typing import get_args

import torch

from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.quantizers.digits import SEARCHED, DigitCodes, Tables
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, PolarTree
from kvcache_compress.codecs.quantizers.scalar import Scalar
from kvcache_compress.cpu_kernels import build

_SCALARS = get_args(Scalar)


def quantize_levels(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """Twin of `scalar.quantize` for float32 `z` `[..., width]`: equal codes, scalars to one unit in the last place."""
    operator = build.operators().quantize_levels.default
    return tuple(operator(z.contiguous(), norm.contiguous(), levels, bits, _SCALARS.index(scalar)))


def quantize_trellis(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """Twin of `trellis.quantize` for float32 `z` `[..., width]`: equal codes, scalars to one unit in the last place."""
    operator = build.operators().quantize_trellis.default
    return tuple(operator(z.contiguous(), norm.contiguous(), levels, bits, _SCALARS.index(scalar)))


def quantize_groups(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, tokens: int, channels: int
) -> Fields:
    """Twin of `kivi.quantize` for float32 `x` `[B, H, T, D]`."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return tuple(build.operators().quantize_groups.default(x, scale, zero, bits, tokens, channels))


def quantize_pairs(
    real: torch.Tensor, imaginary: torch.Tensor, steps: torch.Tensor, bounds: torch.Tensor, angle_bits: int,
    radius_bits: int,
) -> Fields:  # fmt: skip
    """Twin of `polar_pairs.quantize`; float32 `real`, `imaginary` and `steps` `[..., pairs]`."""
    operator = build.operators().quantize_pairs.default
    numbers = (x.contiguous() for x in (real, imaginary, steps))
    return tuple(operator(*numbers, bounds, angle_bits, radius_bits))


def quantize_tree(
    y: torch.Tensor, tree: PolarTree, books: tuple[AngleCodebook, ...]
) -> tuple[Fields, torch.Tensor, torch.Tensor]:
    """Twin of `encode` in `codecs/quantizers/polar_tree.py` for float32 `y` `[..., D]`."""
    points, bounds = [book.points for book in books], [book.bounds for book in books]
    operator = build.operators().quantize_tree.default
    *planes, energy, cross = operator(y.contiguous(), points, bounds, tree.places, books[0].lower)
    return tuple(planes), energy, cross


def quantize_digits(y: torch.Tensor, deviation: torch.Tensor, digits: DigitCodes, tables: Tables) -> Fields:
    """Twin of `quantize` in `codecs/quantizers/digits.py`, for a multiple of eight tokens: equal codes and scales."""
    operator = build.operators().quantize_digits.default
    stored = digits.channels.long(), digits.shifts.long(), digits.counts.twos
    return tuple(operator(y.contiguous(), deviation, digits.kind.long(), *tables, *stored, SEARCHED))


def attention_costs(
    query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, scaling: float, sinks: int, recent: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `attention_costs` in `methods/spectral/moments.py` for float32 queries `[H, R, D]`, up to rounding."""
    logits = (query * (scaling * math.log2(math.e))) @ keys.mT
    groups = -(-(keys.shape[1] - sinks) // group)
    return tuple(build.operators().attention_costs.default(logits, at, sinks, recent, group, groups))


def nearest(z: torch.Tensor, tables: torch.Tensor, costs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `additive.nearest` for float32 `z` `[*, n, w]`; products by torch, so that codes are equal."""
    products = z @ tables.flatten(-3, -2).mT
    return tuple(build.operators().subtract_nearest.default(z, products, costs, tables))
