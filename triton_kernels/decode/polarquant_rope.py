"""Scores of PolarQuant's polar codes (Wu et al., sections 3.2 and 3.3).

With angle codes a_j[t], radii r_j[t] = (code + offset) · scale (per group, or folded into the query), and φ the unit
vectors of the angles, the scores are `s[t] = Σ_j q_xj r_j cos φ(a_j) + q_yj r_j sin φ(a_j)`.

The fast path looks up cos and sin as `lookup.py` does levels. Tables hold eight angles, with inverted signs: half a
turn of 4-bit codes, a quarter turn of 5-bit codes. The top bit of a code adds half a turn, which negates cos and sin.
In the second quarter, 5-bit angles (midpoints of their cells) mirror those of the first: cos and sin swap, and cos
changes its sign.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES, padded_words
from kvcache_compress.codecs.quantizers.polar_pairs import PairCodes
from kvcache_compress.triton_kernels.common import assembly, lookup
from kvcache_compress.triton_kernels.common.codes import (
    Codes,
    codes_of,
    high_plane,
    load_codes,
    load_row,
    load_scales,
    load_words,
    low_plane,
    planes,
    tile_channels,
)
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order, with_mean


class Polar(NamedTuple):
    """Codes of angles and radii, and the offset of decoded radii in their cells.

    tokens: tokens of a group that shares scales, or 0; match: True if scores are scaled; fast: True if `directions`
    and `lookup.py` can unpack the codes.
    """

    angles: Codes
    radii: Codes
    offset: float
    tokens: int
    match: bool
    fast: bool


def _tables(first: int) -> tuple[tuple[str, str, str, str], tuple[str, str, str, str]]:
    """Registers of the tables of cos and of sin; Triton passes every constant twice (`pack=2`)."""
    cos_0, cos_1, cos_2, cos_3, sin_0, sin_1, sin_2, sin_3 = (f"${first + 2 * i}" for i in range(8))
    return (cos_0, cos_1, cos_2, cos_3), (sin_0, sin_1, sin_2, sin_3)


def _five_bits() -> list[str]:
    cos, sin = _tables(22)
    lines = [
        "lop3.b32 r0, $20, $21, 0x0f0f, 0xe4",
        "prmt.b32 r0, $18, $19, r0",
        "prmt.b32 r0, r0, 0, 0x1100",  # bytes A A B B of the high plane
        "shr.u32 r1, r0, 1",
        "lop3.b32 r9, r1, r0, 0xff00ff00, 0xe4",  # bit j holds fields j and j + 1 of A, and of B
    ]
    for half, places in ((0, "0x5140"), (1, "0x7362")):
        lines += [
            f"prmt.b32 r0, $16, $17, {places}",
            "and.b32 r1, r0, 0x88888888",
            "shr.u32 r2, r1, 3",
            "sub.u32 r2, r1, r2",  # 7 in the second quarter
            "lop3.b32 r3, r0, r2, 0x77777777, 0x28",  # (code ^ r2) & 7
            "shl.b32 r4, r0, 4",
            "shr.u32 r5, r3, 16",
        ]
        for part, selectors, signs in ((0, "r3", "0x5140"), (2, "r5", "0x7362")):
            field = 4 * half + part
            lines += [f"prmt.b32 r6, r4, r0, {signs}", f"shl.b32 r7, r9, {7 - field}", "xor.b32 r6, r6, r7"]
            lines += assembly.pairs(selectors, cos, (f"${field}", f"${field + 1}"), "r6")
            lines += assembly.pairs(selectors, sin, (f"${8 + field}", f"${9 + field}"), "r7")
    return lines


FOUR_BITS = assembly.block(16, 18, *lookup.four_bits("$16", "$17", *_tables(18)))
FIVE_BITS = assembly.block(16, 22, *_five_bits())


@triton.jit
def directions(tile, CODES: tl.constexpr):
    """Tiles of cos, then tiles of sin, float16 in code order; the last of the words are `assembly.places`."""
    words = tile.words
    b_words = load_words(low_plane(tile, CODES), tile, CODES.words, CODES.padded, CODES.words)
    if CODES.bits == 4:
        b_both = assembly.assembled(FOUR_BITS, (b_words,) + words[:8], 16)
    else:
        b_high = assembly.load_bytes(high_plane(tile, CODES), tile, CODES.words, CODES.padded, CODES.words)
        b_both = assembly.assembled(FIVE_BITS, (b_words, b_high, words[len(words) - 1]) + words[:8], 16)
    if CODES.padded < 16:
        b_both = assembly.joined(b_both)
    return b_both


@triton.jit
def as_numbers(b_codes, DTYPE: tl.constexpr):
    """Convert codes below 1024 to numbers; in 16 bits through the mantissa of 1024, which saves a conversion."""
    if tl.float16 == DTYPE:
        b_numbers = (b_codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    else:
        b_numbers = b_codes.to(DTYPE)
    return b_numbers


@triton.jit
def decoded_radii(
    b_steps, tile, i: tl.constexpr, META: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, FAST: tl.constexpr
):
    """Radii `(steps / UNIT + OFFSET) scale` of tile `i`, whose tokens lie in one group."""
    CODES: tl.constexpr = META.radii
    if META.tokens == 0:
        b_scale = tl.full([1, 1], 1.0, b_steps.dtype)
    else:
        tl.static_assert(b_steps.shape[0] <= META.tokens)
        p_scale = tile.fields[CODES.field + planes(CODES.bits)] + tile.o_row // META.tokens * (8 * CODES.words)
        if CODES.words == CODES.padded and p_scale.dtype.element_ty.primitive_bitwidth == 16:
            WIDTH: tl.constexpr = b_steps.shape[1]
            b_scale = load_row(p_scale + i * WIDTH, WIDTH).to(b_steps.dtype)
        else:
            o_d, m_d = tile_channels(i, CODES)
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
def unpacked_scores(b_q, tile, META: tl.constexpr):
    """Scores from unpacked codes: the portable path."""
    ANGLES: tl.constexpr = META.angles
    RADII: tl.constexpr = META.radii
    DTYPE: tl.constexpr = b_q[0].dtype
    b_angles, b_steps = load_codes(tile, ANGLES), load_codes(tile, RADII)
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    TILES: tl.constexpr = len(b_angles)
    for j in tl.static_range(TILES):
        b_radii = decoded_radii(as_numbers(b_steps[j], DTYPE), tile, j, META, 1, META.offset, False)
        b_cos, b_sin = points(tile.tables[0], b_angles[j], DTYPE)
        b_s = tl.dot(b_radii * b_cos, b_q[j], b_s, input_precision="ieee")
        b_s = tl.dot(b_radii * b_sin, b_q[TILES + j], b_s, input_precision="ieee")
    return b_s


@triton.jit
def looked_up_scores(b_q, tile, META: tl.constexpr):
    """Scores by `directions` and `lookup.py`; the words are the tables of angles, then of radii."""
    ANGLES: tl.constexpr = META.angles
    RADII: tl.constexpr = META.radii
    UNIT: tl.constexpr = lookup.unit(RADII.bits)
    OFFSET: tl.constexpr = META.offset + (2**RADII.bits - 1) / 2
    b_points = directions(tile, ANGLES)
    b_steps = lookup.levels(tile, tile.words, RADII, 8, True)
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    TILES: tl.constexpr = len(b_steps)
    for j in tl.static_range(TILES):
        b_radii = decoded_radii(b_steps[j], tile, j, META, UNIT, OFFSET, True)
        b_x, b_y = assembly.product(b_points[j], b_radii), assembly.product(b_points[TILES + j], b_radii)
        b_s = tl.dot(b_x, b_q[j], b_s, input_precision="ieee")
        b_s = tl.dot(b_y, b_q[TILES + j], b_s, input_precision="ieee")
    return b_s


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = Σ_j q_xj r_j cos φ(a_j) + q_yj r_j sin φ(a_j)"""
    b_s = looked_up_scores(b_q, tile, META) if FAST and META.fast else unpacked_scores(b_q, tile, META)
    if META.match:
        b_s *= load_scales(tile.fields[len(tile.fields) - 1], tile).to(tl.float32)[:, None]
    return b_s


def polarquant_rope_side(
    codes: PairCodes, points: torch.Tensor, basis: torch.Tensor, mean: torch.Tensor | None
) -> KernelSide:
    """Kernel operands of RoPE pairs in polar codes, and the keys' `mean` `[H, D]`, if any.

    points: unit vectors of the angle codes, float32 `[2 ** angle_bits, 2]`.
    basis: rows of the pairs' real parts, then of their imaginary parts, `[H or 1, D, D]`.
    """
    pairs = basis.shape[1] // 2
    fast = lookup.fits(pairs, codes.radius_bits) and _fits(points, pairs)
    angles = codes_of(codes.angle_bits, pairs, 0)
    radii = codes_of(codes.radius_bits, pairs, len(PLANES[codes.angle_bits]))
    meta = Polar(angles, radii, codes.offset, codes.tokens, codes.match, fast)
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
        angles = (assembly.byte_table(-part, 3) for part in points[:8].T.cpu())  # the tables of `directions`
        words = *angles, lookup.even_table(codes.radius_bits), assembly.places(side.places)
        side.words = torch.cat(words).to(points.device)
    return side


def _fits(points: torch.Tensor, width: int) -> bool:
    """True if `directions` can unpack codes of `width` channels to these unit vectors `[angles, 2]`."""
    mirrored = torch.allclose(points[:8], points[:8].flip(0, 1), atol=1e-6)
    return lookup.fits(width, 1) and (len(points) == 16 or (len(points) == 32 and mirrored))
