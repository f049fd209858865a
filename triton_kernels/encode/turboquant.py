"""TurboQuant's encoders: rotation, norm, codes and stored scalar of a run of tokens in one launch.

`encode_tokens` follows the contract of `KernelEncoder`, so steps of static layers use it too (`write_slots.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES, padded_width, padded_words, words_per_token
from kvcache_compress.codecs.quantizers import trellis
from kvcache_compress.codecs.quantizers.scalar import Component, Scalar, boundaries
from kvcache_compress.triton_kernels.common.codes import store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder

from .rotate import rotated
from .trellis import best_path

MAX_WIDTH = 256
"""Most channels of a channel set: wider tiles would spill registers and exceed shared memory."""
MAX_TRELLIS_WIDTH = 128
"""The same for trellis codes."""
SCALARS: tuple[Scalar, ...] = ("norm", "match", "unbiased", "least_squares")
"""Stored scalars; kernels get their index, as Triton accepts no strings in tuples of tuples."""
NORM, MATCH, UNBIASED = (tl.constexpr(number) for number in range(3))


class Sets(NamedTuple):
    """Constants of the channel sets: bits of a code, words of a token, padded words, planes, first field, stride.

    stride: head stride of a set's rows; trellis: True for trellis codes. Of all sets: index of the stored scalar, and
    whether keys are centred.
    """

    bits: tuple[int, ...]
    words: tuple[int, ...]
    padded: tuple[int, ...]
    planes: tuple[int, ...]
    field: tuple[int, ...]
    stride: tuple[int, ...]
    trellis: tuple[bool, ...]
    scalar: int
    centred: bool


@triton.jit
def nearest_codes(b_z, p_levels, p_bounds, BITS: tl.constexpr):
    """Codes of the levels nearest to the coordinates."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    b_codes = tl.zeros(b_z.shape, tl.int32)
    for i in tl.static_range(2**BITS - 1):
        b_codes = tl.where(b_z > tl.load(p_bounds + i), i + 1, b_codes)
    turned = tl.where(tl.load(p_levels) > tl.load(p_levels + 1), HALF - 1, 0)  # levels in `outward` order
    return tl.where(b_codes < HALF, b_codes ^ turned, b_codes)


@triton.jit
def nearest_units(b_z, p_levels, p_bounds, BITS: tl.constexpr, STEPS: tl.constexpr):
    """Levels nearest to the coordinates, in whole steps."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    turned = tl.where(tl.load(p_levels) > tl.load(p_levels + 1), HALF - 1, 0)  # levels in `outward` order
    b_units = tl.zeros(b_z.shape, tl.int32) + (tl.load(p_levels + turned) * STEPS).to(tl.int32)
    for i in tl.range(1, 2**BITS, disable_licm=True):
        level = tl.load(p_levels + tl.where(i < HALF, i ^ turned, i))
        b_units = tl.where(b_z > tl.load(p_bounds + i - 1), (level * STEPS).to(tl.int32), b_units)
    return b_units


@triton.jit
def encode_set(
    p_x, o_x, m_t, p_rows, p_levels, p_bounds, p_mean, p_low, p_high, p_scale, o_row, D: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, TRELLIS: tl.constexpr,
    CENTRED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotate, normalise and quantize the tokens of one channel set (Algorithm 1).

    Codes and scalar equal those of `quantize` in `scalar` and `trellis`. `p_bounds` are the boundaries of the levels,
    or the levels of a trellis in whole steps.
    """
    # Channels in memory order, with zeros as padding.
    o_c = tl.arange(0, 8 * PADDED)
    o_w, m_w = o_c // PADDED * WORDS + o_c % PADDED, o_c % PADDED < WORDS
    b_z = rotated(p_x, o_x, m_t, p_rows, o_w, m_w, p_mean, D, CENTRED, PRECISION)
    b_scale = tl.sqrt(tl.sum(b_z * b_z, 1))
    b_z = tl.reshape(b_z / tl.maximum(b_scale, 1e-30)[:, None], [o_x.shape[0], 8, PADDED])
    m_z = m_t[:, None, None] & (tl.arange(0, PADDED) < WORDS)[None, None, :]
    if TRELLIS:
        b_codes, b_index = best_path(b_z, p_bounds, BITS, WORDS, PADDED)
    elif SCALAR == NORM or BITS == 1:
        b_codes = nearest_codes(b_z, p_levels, p_bounds, BITS)
    else:
        # Scales are compared in integers (see `scalar.quantize`): sums are equal whatever their order.
        STEPS: tl.constexpr = 256 * (8 * WORDS) ** 0.5
        b_best = tl.full(b_scale.shape, -1.0, tl.float64)
        b_factor = tl.zeros(b_scale.shape, tl.float32)
        for i in tl.range(5, disable_licm=True):
            factor = (26 + 3 * i) / 32
            b_units = tl.where(m_z, nearest_units(b_z * factor, p_levels, p_bounds, BITS, STEPS), 0)
            b_cross = tl.sum(tl.sum((b_z * STEPS).to(tl.int32) * b_units, 2), 1).to(tl.float64)
            b_closeness = b_cross * b_cross / tl.sum(tl.sum(b_units * b_units, 2), 1).to(tl.float64)
            b_factor = tl.where(b_closeness > b_best, factor, b_factor)
            b_best = tl.maximum(b_closeness, b_best)
        b_codes = nearest_codes(b_z * b_factor[:, None, None], p_levels, p_bounds, BITS)
    store_codes(b_codes, p_low, p_high, o_row, m_t, BITS, WORDS, PADDED)
    if SCALAR != NORM:
        b_point = tl.where(m_z, tl.load(p_levels + (b_index if TRELLIS else b_codes)), 0.0)
        # A zero vector's products are all -0.0 at negative levels; torch's sums begin with 0.0.
        b_cross = tl.sum(tl.sum(b_z * b_point, 2), 1) + 0.0
        b_square = tl.sum(tl.sum(b_point * b_point, 2), 1)
        if SCALAR == MATCH:
            b_scale = b_scale / tl.sqrt(b_square)
        elif SCALAR == UNBIASED:
            b_scale = b_scale * tl.sum(tl.sum(b_z * b_z, 2), 1) / tl.maximum(b_cross, 1e-12)
        else:
            b_scale = b_scale * b_cross / b_square
    tl.store(p_scale + o_row, tl.minimum(b_scale, 65504.0).to(tl.float16), mask=m_t)


@triton.jit
def encode_tokens(
    p_x, o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h, D: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode one channel set after the other (Algorithm 1; section 4.3).

    `tables` are rows `[H or 1, width, D]`, levels and `p_bounds` of each set, then the mean `[H, D]`.
    """
    SETS: tl.constexpr = len(META.bits)
    for i in tl.static_range(SETS):
        encode_set(
            p_x, o_x, m_t, tables[3 * i] + i_h * META.stride[i], tables[3 * i + 1], tables[3 * i + 2],
            tables[3 * SETS] + i_h * D, fields[META.field[i]], fields[META.field[i] + META.planes[i] - 1],
            fields[META.field[i] + META.planes[i]], o_row, D, META.bits[i], META.words[i], META.padded[i],
            META.scalar, META.trellis[i], META.centred, PRECISION,
        )  # fmt: skip


def turboquant_encoder(
    components: Sequence[Component], basis: Sequence[torch.Tensor], scalar: Scalar, mean: torch.Tensor | None
) -> KernelEncoder | None:
    """Encoder of tokens less the `mean` `[H, D]` of keys, if any; None if a token would spill registers.

    basis: rows of each component, `[H or 1, width, D]`, contiguous.
    """
    if any(padded_width(c.width) > (MAX_TRELLIS_WIDTH if c.trellis else MAX_WIDTH) for c in components):
        return None
    sets, tables, at = [], [], 0
    for component, rows in zip(components, basis, strict=True):
        width, bits = component.width, component.bits
        stride = rows.stride(0) if len(rows) > 1 else 0
        planes = len(PLANES[bits])
        sets.append((bits, words_per_token(width), padded_words(width), planes, at, stride, component.trellis))
        levels = component.levels
        tables += [rows, levels, trellis.in_steps(levels, width) if component.trellis else boundaries(levels)]
        at += planes + 1
    tables.append(tables[0] if mean is None else mean)
    meta = Sets(*zip(*sets, strict=True), scalar=SCALARS.index(scalar), centred=mean is not None)
    return KernelEncoder(encode_tokens, meta, tuple(tables))
