"""PolarQuant's encoder of RoPE pairs: angles, radii and their scales in one launch (Wu et al., section 3.2).

    angle = floor(2^(m-1) θ / π) mod 2^m,  radius = clamp(floor(r / s)),  s = max r / steps of a pair and group

No angle is computed: a point rotated back to the first quarter is `(u, v)`, and lies beyond the boundary β if
`v cos β ≥ u sin β`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES, padded_words, words_per_token
from kvcache_compress.codecs.quantizers.polar_pairs import PairCodes
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.triton_kernels.common.codes import store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder

from .launch import MANY_TOKENS

MAX_PAIRS = 4096
"""Pairs, over all tokens of a group, that a program holds at a time; more would spill registers."""


class Pairs(NamedTuple):
    """Bits and planes of angles and of radii, words of a token, words at a time, tokens of a group or 0.

    steps: radius steps in the largest radius of a scale; offset: position of decoded radii in their cells;
    centred, match: True if keys are centred, and if their norms are matched.
    """

    angle_bits: int
    radius_bits: int
    angle_planes: int
    radius_planes: int
    words: int
    count: int
    tokens: int
    steps: int
    offset: float
    centred: bool
    match: bool


@triton.jit
def angle_codes(b_x, b_y, p_bounds, BITS: tl.constexpr):
    """Codes of the angles of points, as `polar_pairs.angle_codes` of the torch twin."""
    m_1, m_2, m_3 = (b_y > 0) & (b_x <= 0), (b_y <= 0) & (b_x < 0), (b_y < 0) & (b_x >= 0)
    b_codes = (m_1.to(tl.int32) + 2 * m_2.to(tl.int32) + 3 * m_3.to(tl.int32)) * 2 ** (BITS - 2)
    b_u = tl.where(m_1 | m_3, tl.abs(b_y), tl.abs(b_x))
    b_v = tl.where(m_1 | m_3, tl.abs(b_x), tl.abs(b_y))
    # The angle of zero is zero.
    b_u = tl.where(b_v > 0, b_u, 1.0)
    for i in tl.static_range(1, 2 ** (BITS - 2)):
        b_codes += (b_v * tl.load(p_bounds + 2 * i) >= b_u * tl.load(p_bounds + 2 * i + 1)).to(tl.int32)
    return b_codes


@triton.jit
def group_scale(
    b_radius, p_scale, o_row, m_t, o_p, m_p, WORDS: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr
):
    """Store the scale of each pair of a tile that is one group, and return it as stored: `[8, words]`."""
    tl.static_assert(b_radius.shape[0] == TOKENS)
    b_scale = tl.max(b_radius, 0)
    b_scale = tl.div_rn(b_scale, tl.full(b_scale.shape, STEPS, tl.float32))
    b_scale = tl.minimum(b_scale, 65504.0).to(tl.float16)
    m_s = m_p.to(tl.int32) * tl.max(m_t.to(tl.int32), 0) > 0
    tl.store(p_scale + tl.max(o_row // TOKENS, 0) * (8 * WORDS) + o_p, b_scale, mask=m_s)
    return b_scale.to(tl.float32)


@triton.jit
def encode_words(p_x, o_x, m_t, fields, o_row, tables, i_h, D: tl.constexpr, META: tl.constexpr, FIRST: tl.constexpr):
    """Encode the pairs of words from `FIRST` on; return their share of squared lengths before and after, each `[T]`."""
    RADII: tl.constexpr = META.angle_planes
    AT: tl.constexpr = RADII + META.radius_planes
    WORDS: tl.constexpr = META.words
    COUNT: tl.constexpr = META.count
    o_w = FIRST + tl.arange(0, COUNT)[None, :]
    o_p = tl.arange(0, 8)[:, None] * WORDS + o_w
    m_p = (o_w < WORDS) & (o_p >= 0)
    o_real = tl.load(tables[0] + o_p, mask=m_p, other=0)
    o_imaginary = tl.load(tables[0] + 8 * WORDS + o_p, mask=m_p, other=0)
    m_x = m_t[:, None, None] & m_p[None, :, :]
    b_x = tl.load(p_x + o_x[:, None, None] + o_real[None, :, :], mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(p_x + o_x[:, None, None] + o_imaginary[None, :, :], mask=m_x, other=0.0).to(tl.float32)
    if META.centred:
        b_x -= tl.load(tables[3] + i_h * D + o_real, mask=m_p, other=0.0)[None, :, :]
        b_y -= tl.load(tables[3] + i_h * D + o_imaginary, mask=m_p, other=0.0)[None, :, :]
    b_angle = angle_codes(b_x, b_y, tables[1], META.angle_bits)
    store_codes(b_angle, fields[0], fields[RADII - 1], o_row, m_t, META.angle_bits, WORDS, COUNT, FIRST)
    b_square = b_x * b_x + b_y * b_y
    b_radius = tl.sqrt_rn(b_square)
    if META.tokens > 0:
        b_scale = group_scale(b_radius, fields[AT], o_row, m_t, o_p, m_p, WORDS, META.steps, META.tokens)
    else:
        b_scale = tl.load(tables[2] + i_h * (8 * WORDS) + o_p, mask=m_p, other=0.0)
    b_steps = tl.floor(tl.div_rn(b_radius, tl.maximum(b_scale, 1e-30)[None, :, :]))
    b_steps = tl.minimum(tl.maximum(b_steps, 0.0), 2**META.radius_bits - 1)
    store_codes(b_steps.to(tl.int32), fields[RADII], fields[AT - 1], o_row, m_t, META.radius_bits, WORDS, COUNT, FIRST)
    b_point = (b_steps + META.offset) * b_scale[None, :, :]
    return tl.sum(tl.sum(b_square, 2), 1), tl.sum(tl.sum(b_point * b_point, 2), 1)


@triton.jit
def encode_pairs(
    p_x, o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h, D: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode the pairs of a few words at a time (Wu et al., section 3.2).

    `tables` are the channels of all pairs, `[2, pairs]`; the boundaries in a quadrant, cos and sin; scales
    `[H, pairs]` unless groups have their own; and the mean `[H, D]`.
    """
    b_square = tl.zeros([o_x.shape[0]], tl.float32)
    b_point = b_square
    for i in tl.static_range((META.words + META.count - 1) // META.count):
        b_before, b_after = encode_words(p_x, o_x, m_t, fields, o_row, tables, i_h, D, META, i * META.count)
        b_square += b_before
        b_point += b_after
    if META.match:
        b_match = tl.div_rn(tl.sqrt_rn(b_square), tl.maximum(tl.sqrt_rn(b_point), 1e-30))
        tl.store(fields[len(fields) - 1] + o_row, tl.minimum(b_match, 65504.0).to(tl.float16), mask=m_t)


def polarquant_rope_encoder(
    codes: PairCodes, layout: RopeLayout, bounds: torch.Tensor, scale: torch.Tensor | None, mean: torch.Tensor | None
) -> KernelEncoder:
    """Encoder of RoPE pairs of keys less their `mean` `[H, D]`, if any.

    bounds: `quarter_bounds` of the angles.
    scale: of radii, float32 `[H, pairs]`, or None if each group has its own.
    """
    at_once = MAX_PAIRS // (8 * (codes.tokens or MANY_TOKENS))
    meta = Pairs(
        codes.angle_bits, codes.radius_bits, len(PLANES[codes.angle_bits]), len(PLANES[codes.radius_bits]),
        words_per_token(layout.pairs), min(padded_words(layout.pairs), at_once), codes.tokens, codes.steps,
        codes.offset, mean is not None, codes.match,
    )  # fmt: skip
    channels = torch.tensor(layout.order, dtype=torch.int32, device=bounds.device)
    tables = (channels, bounds, bounds if scale is None else scale, bounds if mean is None else mean)
    return KernelEncoder(encode_pairs, meta, tables, codes.tokens or 1)
