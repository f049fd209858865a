"""PolarQuant's encoder of RoPE pairs: angles, radii and their scales in one launch (Wu et al., section 3.2).

    angle = floor(2^(m-1) θ / π) mod 2^m,  radius = clamp(floor(r / s)),  s = max r / steps of a pair and group

No angle is computed: a point rotated back to the first quarter is `(u, v)`, and lies beyond the boundary β if
`v cos β ≥ u sin β`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.quantizers.polar_pairs import PairCodes
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, planes, store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder

from .launch import MANY_TOKENS

MAX_PAIRS = 4096
"""Pairs, over all tokens of a group, that a program holds at a time; more would spill registers."""


class Pairs(NamedTuple):
    """Codes of angles and radii, of which `padded` words are made at a time; tokens of a group or 0.

    steps: radius steps in the largest radius of a scale; offset: position of decoded radii in their cells;
    centred, match: True if keys are centred, and if their norms are matched.
    """

    angles: Codes
    radii: Codes
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
def group_scale(b_radius, tile, o_p, m_p, META: tl.constexpr):
    """Store the scale of each pair of a tile that is one group, and return it as stored: `[8, words]`."""
    RADII: tl.constexpr = META.radii
    tl.static_assert(b_radius.shape[0] == META.tokens)
    b_scale = tl.max(b_radius, 0)
    b_scale = tl.div_rn(b_scale, tl.full(b_scale.shape, META.steps, tl.float32))
    b_scale = tl.minimum(b_scale, 65504.0).to(tl.float16)
    m_s = m_p.to(tl.int32) * tl.max(tile.m_t.to(tl.int32), 0) > 0
    p_scale = tile.fields[RADII.field + planes(RADII.bits)] + tl.max(tile.o_row // META.tokens, 0) * (8 * RADII.words)
    tl.store(p_scale + o_p, b_scale, mask=m_s)
    return b_scale.to(tl.float32)


@triton.jit
def encode_words(tile, D: tl.constexpr, META: tl.constexpr, FIRST: tl.constexpr):
    """Encode the pairs of words from `FIRST` on; return their share of squared lengths before and after, each `[T]`."""
    ANGLES: tl.constexpr = META.angles
    RADII: tl.constexpr = META.radii
    WORDS: tl.constexpr = RADII.words
    tables = tile.tables
    o_w = FIRST + tl.arange(0, RADII.padded)[None, :]
    o_p = tl.arange(0, 8)[:, None] * WORDS + o_w
    m_p = (o_w < WORDS) & (o_p >= 0)
    o_real = tl.load(tables[0] + o_p, mask=m_p, other=0)
    o_imaginary = tl.load(tables[0] + 8 * WORDS + o_p, mask=m_p, other=0)
    p_x, m_x = tile.p_x + tile.o_x[:, None, None], tile.m_t[:, None, None] & m_p[None, :, :]
    b_x = tl.load(p_x + o_real[None, :, :], mask=m_x, other=0.0).to(tl.float32)
    b_y = tl.load(p_x + o_imaginary[None, :, :], mask=m_x, other=0.0).to(tl.float32)
    if META.centred:
        p_mean = tables[3] + tile.i_h * D
        b_x -= tl.load(p_mean + o_real, mask=m_p, other=0.0)[None, :, :]
        b_y -= tl.load(p_mean + o_imaginary, mask=m_p, other=0.0)[None, :, :]
    store_codes(angle_codes(b_x, b_y, tables[1], ANGLES.bits), tile, ANGLES, FIRST)
    b_square = b_x * b_x + b_y * b_y
    b_radius = tl.sqrt_rn(b_square)
    if META.tokens > 0:
        b_scale = group_scale(b_radius, tile, o_p, m_p, META)
    else:
        b_scale = tl.load(tables[2] + tile.i_h * (8 * WORDS) + o_p, mask=m_p, other=0.0)
    b_steps = tl.floor(tl.div_rn(b_radius, tl.maximum(b_scale, 1e-30)[None, :, :]))
    b_steps = tl.minimum(tl.maximum(b_steps, 0.0), 2**RADII.bits - 1)
    store_codes(b_steps.to(tl.int32), tile, RADII, FIRST)
    b_point = (b_steps + META.offset) * b_scale[None, :, :]
    return tl.sum(tl.sum(b_square, 2), 1), tl.sum(tl.sum(b_point * b_point, 2), 1)


@triton.jit
def encode_pairs(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode the pairs of a few words at a time (Wu et al., section 3.2).

    `tables` are the channels of all pairs, `[2, pairs]`; the boundaries in a quadrant, cos and sin; scales
    `[H, pairs]` unless groups have their own; and the mean `[H, D]`.
    """
    WORDS: tl.constexpr = META.radii.words
    COUNT: tl.constexpr = META.radii.padded
    b_square = tl.zeros([tile.o_x.shape[0]], tl.float32)
    b_point = b_square
    for first in tl.static_range(0, WORDS, COUNT):
        b_before, b_after = encode_words(tile, D, META, first)
        b_square += b_before
        b_point += b_after
    if META.match:
        b_match = tl.div_rn(tl.sqrt_rn(b_square), tl.maximum(tl.sqrt_rn(b_point), 1e-30))
        p_match = tile.fields[len(tile.fields) - 1] + tile.o_row
        tl.store(p_match, tl.minimum(b_match, 65504.0).to(tl.float16), mask=tile.m_t)


def polarquant_rope_encoder(
    codes: PairCodes, layout: RopeLayout, bounds: torch.Tensor, scale: torch.Tensor | None, mean: torch.Tensor | None
) -> KernelEncoder:
    """Encoder of RoPE pairs of keys less their `mean` `[H, D]`, if any.

    bounds: `quarter_bounds` of the angles.
    scale: of radii, float32 `[H, pairs]`, or None if each group has its own.
    """
    at_once = MAX_PAIRS // (8 * (codes.tokens or MANY_TOKENS))
    angles = codes_of(codes.angle_bits, layout.pairs, 0)
    radii = codes_of(codes.radius_bits, layout.pairs, len(PLANES[codes.angle_bits]))
    padded = min(radii.padded, at_once)
    meta = Pairs(
        angles._replace(padded=padded), radii._replace(padded=padded), codes.tokens, codes.steps, codes.offset,
        mean is not None, codes.match,
    )  # fmt: skip
    channels = torch.tensor(layout.order, dtype=torch.int32, device=bounds.device)
    tables = (channels, bounds, bounds if scale is None else scale, bounds if mean is None else mean)
    return KernelEncoder(encode_pairs, meta, tables, codes.tokens or 1)
