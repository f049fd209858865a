"""Scores of PolarQuant's polar codes (Wu et al., sections 3.2 and 3.3).

With angle codes a_j[t], radii r_j[t] = (code + offset) · scale (per group, or folded into the query), and φ the unit
vectors of the angles, the scores are `s[t] = Σ_j q_xj r_j cos φ(a_j) + q_yj r_j sin φ(a_j)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token
from kvcache_compress.codecs.quantizers.polar_pairs import PairCodes
from kvcache_compress.triton_kernels.common import assembly, directions, lookup
from kvcache_compress.triton_kernels.common.codes import load_codes, load_row, load_scales, tile_channels
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order, with_mean


class Polar(NamedTuple):
    """Bits of angles and radii, words of a token, padded words (`codes.py`), offset of decoded radii in their cells.

    tokens: tokens of a group that shares scales, or 0; match: True if scores are scaled; fast: True if `directions.py`
    and `lookup.py` can unpack the codes.
    """

    angle_bits: int
    radius_bits: int
    words: int
    padded: int
    offset: float
    tokens: int
    match: bool
    fast: bool


@triton.jit
def as_numbers(b_codes, DTYPE: tl.constexpr):
    """Convert codes below 1024 to numbers; in 16 bits through the mantissa of 1024, which saves a conversion."""
    if tl.float16 == DTYPE:
        b_numbers = (b_codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    else:
        b_numbers = b_codes.to(DTYPE)
    return b_numbers


@triton.jit
def radii(
    b_steps, p_scale, o_row, i: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, OFFSET: tl.constexpr, TOKENS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Radii `(steps / UNIT + OFFSET) scale` of tile `i`, whose tokens lie in one group."""
    if TOKENS == 0:
        b_scale = tl.full([1, 1], 1.0, b_steps.dtype)
    else:
        tl.static_assert(b_steps.shape[0] <= TOKENS)
        p_scale += o_row // TOKENS * (8 * WORDS)
        if WORDS == PADDED and p_scale.dtype.element_ty.primitive_bitwidth == 16:
            WIDTH: tl.constexpr = b_steps.shape[1]
            b_scale = load_row(p_scale + i * WIDTH, WIDTH).to(b_steps.dtype)
        else:
            o_d, m_d = tile_channels(i, WORDS, PADDED)
            b_scale = tl.load(p_scale + o_d[None, :], mask=m_d[None, :], other=0.0).to(b_steps.dtype)
    b_zero = b_scale * OFFSET
    b_scale *= 1 / UNIT
    return assembly.scaled(b_steps, b_scale, b_zero) if FAST else b_steps * b_scale + b_zero


@triton.jit
def points(p_points, b_angles, DTYPE: tl.constexpr):
    """Look up cos and sin of angle codes in a table `[angles, 2]`; float16 needs one load for both."""
    if tl.float16 == DTYPE:
        b_both = tl.load(p_points.to(tl.pointer_type(tl.int32), bitcast=True) + b_angles)
        b_cos = b_both.to(tl.int16).to(tl.float16, bitcast=True)
        b_sin = (b_both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        b_cos = tl.load(p_points + 2 * b_angles)
        b_sin = tl.load(p_points + 2 * b_angles + 1)
    return b_cos, b_sin


@triton.jit
def unpacked_scores(
    b_q, fields, p_points, p_scale, o_row, o_t, m_t,
    META: tl.constexpr, AT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Scores from unpacked codes: the portable path."""
    b_angles = load_codes(
        fields[0], fields[AT - 1], o_row, o_t, m_t, META.angle_bits, META.words, META.padded, META.words
    )
    b_steps = load_codes(
        fields[AT], fields[SCALE - 1], o_row, o_t, m_t, META.radius_bits, META.words, META.padded, META.words
    )
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    TILES: tl.constexpr = len(b_angles)
    for j in tl.static_range(TILES):
        b_steps_j = as_numbers(b_steps[j], b_q[0].dtype)
        b_radii = radii(b_steps_j, p_scale, o_row, j, META.words, META.padded, 1, META.offset, META.tokens, False)
        b_cos, b_sin = points(p_points, b_angles[j], b_q[0].dtype)
        b_s = tl.dot(b_radii * b_cos, b_q[j], b_s, input_precision="ieee")
        b_s = tl.dot(b_radii * b_sin, b_q[TILES + j], b_s, input_precision="ieee")
    return b_s


@triton.jit
def looked_up_scores(
    b_q, fields, words, p_scale, o_row, o_t, m_t,
    META: tl.constexpr, AT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Scores by `directions.py` and `lookup.py`; `words` are the tables of angles, then of radii."""
    BITS: tl.constexpr = META.radius_bits
    b_points = directions.directions(
        fields[0], fields[AT - 1], words, o_row, o_t, m_t, META.angle_bits, META.words, META.padded
    )
    b_steps = lookup.levels(
        fields[AT], fields[SCALE - 1], words, o_row, o_t, m_t, 8, BITS, True, META.words, META.padded, META.words
    )
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    TILES: tl.constexpr = len(b_steps)
    OFFSET: tl.constexpr = META.offset + (2**BITS - 1) / 2
    for j in tl.static_range(TILES):
        b_radii = radii(
            b_steps[j], p_scale, o_row, j, META.words, META.padded, lookup.unit(BITS), OFFSET, META.tokens, True
        )
        b_x, b_y = assembly.product(b_points[j], b_radii), assembly.product(b_points[TILES + j], b_radii)
        b_s = tl.dot(b_x, b_q[j], b_s, input_precision="ieee")
        b_s = tl.dot(b_y, b_q[TILES + j], b_s, input_precision="ieee")
    return b_s


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s[t] = Σ_j q_xj r_j cos φ(a_j) + q_yj r_j sin φ(a_j)"""
    AT: tl.constexpr = 1 if (META.angle_bits == 2 or META.angle_bits == 4) else 2
    SCALE: tl.constexpr = AT + (1 if (META.radius_bits == 2 or META.radius_bits == 4) else 2)
    p_scale = fields[SCALE if META.tokens else 0]
    if FAST and META.fast:
        b_s = looked_up_scores(b_q, fields, words, p_scale, o_row, o_t, m_t, META, AT, SCALE)
    else:
        b_s = unpacked_scores(b_q, fields, tables[0], p_scale, o_row, o_t, m_t, META, AT, SCALE)
    if META.match:
        b_s *= load_scales(fields[len(fields) - 1], o_row, o_t, m_t).to(tl.float32)[:, None]
    return b_s


def polarquant_rope_side(
    codes: PairCodes, points: torch.Tensor, basis: torch.Tensor, mean: torch.Tensor | None
) -> KernelSide:
    """Kernel operands of RoPE pairs in polar codes, and the keys' `mean` `[H, D]`, if any.

    points: unit vectors of the angle codes, float32 `[2 ** angle_bits, 2]`.
    basis: rows of the pairs' real parts, then of their imaginary parts, `[H or 1, D, D]`.
    """
    pairs = basis.shape[1] // 2
    fast = lookup.fits(pairs, codes.radius_bits) and directions.fits(points, pairs)
    meta = Polar(
        codes.angle_bits, codes.radius_bits, words_per_token(pairs), padded_words(pairs), codes.offset, codes.tokens,
        codes.match, fast,
    )  # fmt: skip
    side = KernelSide(
        score,
        meta,
        2 * code_tiles(pairs),
        tables=(points,),
        tokens=16,
        matrix=with_mean(in_code_order(basis, (pairs, pairs)).mT, mean),
    )
    if fast:
        side.places = padded_words(pairs)
        words = [directions.tables(points), *lookup.even_tables(codes.radius_bits)]
        side.words = torch.cat([*words, assembly.places(side.places)]).to(points.device)
    return side
