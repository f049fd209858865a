"""Recursive PolarQuant's encoder: rotation, codes of all levels and radii in one launch (Han et al., Algorithm 1).

The codes are those of `encode` in `codecs/quantizers/polar_tree.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, LevelCodes, PolarTree
from kvcache_compress.codecs.quantizers.scalar import Scalar
from kvcache_compress.triton_kernels.common.codes import low_bits, planes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder
from kvcache_compress.triton_kernels.decode.polarquant_recursive import halves, padding, points

from .turboquant import SCALARS, UNBIASED, rotated


class EncodedTree(NamedTuple):
    """Odd part of the head dimension, padded odd part, roots, boundaries of the circle below π, the stored scalar.

    coded: True if radii have 8 bits; centred: True if keys are centred; stride: head stride of the rows.
    """

    odd: int
    padded: int
    roots: int
    lower: int
    scalar: int
    coded: bool
    centred: bool
    stride: int
    levels: tuple[LevelCodes, ...]


@triton.jit
def store_whole(b_codes, tile, META: tl.constexpr, AT: tl.constexpr, PLANE: tl.constexpr):
    """Pack a plane of the codes of level `AT`, int32 `[T, 8 * words]`, if they fill whole words."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    LEVEL: tl.constexpr = META.levels[AT]
    if LEVEL.count == 8 * LEVEL.words:
        LOW: tl.constexpr = low_bits(LEVEL.bits)
        BITS: tl.constexpr = LEVEL.bits - LOW if PLANE else LOW
        SIZE: tl.constexpr = LEVEL.words // ODD * PAD
        b_parts = (tl.reshape(b_codes, [b_codes.shape[0], 8, SIZE]) >> (LOW * PLANE)) & (2**BITS - 1)
        b_words = tl.sum(b_parts << (BITS * tl.arange(0, 8))[None, :, None], 1)
        o_c = tl.arange(0, SIZE)
        o_w = tile.o_row[:, None] * LEVEL.row + LEVEL.offset + (o_c // PAD * ODD + o_c % PAD)[None, :]
        m_w = tile.m_t[:, None] & (o_c % PAD < ODD)[None, :]
        p_plane = tile.fields[LEVEL.field + PLANE]
        tl.store(p_plane + o_w, b_words.to(p_plane.dtype.element_ty), mask=m_w)


@triton.jit
def store_shared(b_levels, tile, META: tl.constexpr, AT: tl.constexpr, PLANE: tl.constexpr):
    """Pack a plane of the words that level `AT` shares with coarser ones, if it is the first in them."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    LEVEL: tl.constexpr = META.levels[AT]
    WORDS: tl.constexpr = LEVEL.words
    LOW: tl.constexpr = low_bits(LEVEL.bits)
    BITS: tl.constexpr = LEVEL.bits - LOW if PLANE else LOW
    for w in tl.static_range(WORDS if LEVEL.base == 0 and LEVEL.count != 8 * WORDS else 0):
        b_word = tl.zeros([tile.o_row.shape[0]], tl.int32)
        for i in tl.static_range(AT, len(b_levels)):
            if META.levels[i].field == LEVEL.field and META.levels[i].count != 8 * META.levels[i].words:
                o_c = tl.arange(0, b_levels[i].shape[1])
                o_i = META.levels[i].base + o_c // PAD * ODD + o_c % PAD
                m_i = (o_c % PAD < ODD) & (o_i % WORDS == w)
                b_part = (b_levels[i] >> (LOW * PLANE)) & (2**BITS - 1)
                b_part = b_part << (BITS * (o_i // WORDS))[None, :]
                b_word += tl.sum(tl.where(m_i[None, :], b_part, 0), 1)
        p_word = tile.fields[LEVEL.field + PLANE] + tile.o_row * LEVEL.row + LEVEL.offset + w
        tl.store(p_word, b_word.to(p_word.dtype.element_ty), mask=tile.m_t)


@triton.jit
def circle_codes(b_x, b_y, p_bounds, BITS: tl.constexpr, LOWER: tl.constexpr):
    """Nearest codes on the circle: the number of boundaries below each angle (in torch `polar_tree.circle_codes`)."""
    b_near, b_far = tl.zeros(b_x.shape, tl.int32), tl.full(b_x.shape, LOWER, tl.int32)
    for i in tl.static_range(2**BITS):
        b_turned = (b_y * tl.load(p_bounds + 2 * i) > b_x * tl.load(p_bounds + 2 * i + 1)).to(tl.int32)
        if i < LOWER:
            b_near += b_turned
        else:
            b_far += b_turned
    return tl.where(b_y < 0, b_far, b_near) & (2**BITS - 1)


@triton.jit
def deeper_codes(b_energy, p_bounds, BITS: tl.constexpr, START: tl.constexpr):
    """Codes and squared radii of a deeper level, from the squared radii of the level below."""
    b_below, b_above = halves(b_energy)
    b_codes = tl.zeros(b_below.shape, tl.int32)
    for i in tl.static_range(2**BITS - 1):
        p_bound = p_bounds + 2 * (START + i)
        b_codes += (b_above * tl.load(p_bound) > b_below * tl.load(p_bound + 1)).to(tl.int32)
    return b_codes, b_below + b_above


@triton.jit
def store_radii(b_energy, b_cross, tile, META: tl.constexpr):
    """Store the radii of the roots, from squared radii and inner products with code points; 8-bit ones by logarithm."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    ROOTS: tl.constexpr = META.roots
    SCALAR: tl.constexpr = META.scalar
    b_radii = tl.div_rn(b_energy, tl.maximum(b_cross, 1e-30)) if SCALAR == UNBIASED else tl.sqrt_rn(b_energy)
    o_r = tl.arange(0, ROOTS // ODD * PAD)
    o_i = tile.o_row[:, None] * ROOTS + (o_r // PAD * ODD + o_r % PAD)[None, :]
    m_i = tile.m_t[:, None] & (o_r % PAD < ODD)[None, :]
    if META.coded:
        p_range = tile.tables[3] + 2 * tile.i_h
        b_logs = tl.log2(tl.maximum(b_radii, 1e-30))
        b_steps = (b_logs - tl.load(p_range)) / tl.load(p_range + 1)
        b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5) + 1.0, 0.0), 255.0)
        b_radii = tl.where(b_radii > 0, b_codes, 0.0)
    else:
        b_radii = tl.minimum(b_radii, 65504.0)
    p_radii = tile.fields[len(tile.fields) - 1]
    tl.store(p_radii + o_i, b_radii.to(p_radii.dtype.element_ty), mask=m_i)


@triton.jit
def encode_tree(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode all levels, from the first on (Algorithm 1).

    `tables` are rows `[H or 1, D, D]`, boundaries and points of all levels, least logarithm and step of 8-bit radii
    `[H, 2]`, and the mean `[H, D]`. With products not fused with sums but rounded as in torch, all codes follow from
    the rotated numbers to the bit.
    """
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    tables = tile.tables
    o_c = tl.arange(0, D // 2 // ODD * PAD)
    o_y, m_y = o_c // PAD * ODD + o_c % PAD, o_c % PAD < ODD
    p_rows, p_mean = tables[0] + tile.i_h * META.stride, tables[4] + tile.i_h * D
    b_low = rotated(tile, p_rows, o_y, m_y, p_mean, D, META.centred, PRECISION)
    b_high = rotated(tile, p_rows, D // 2 + o_y, m_y, p_mean, D, META.centred, PRECISION)
    b_codes = circle_codes(b_low, b_high, tables[1], META.levels[0].bits, META.lower)
    for plane in tl.static_range(planes(META.levels[0].bits)):
        store_whole(b_codes, tile, META, 0, plane)
    b_levels = (b_codes,)
    b_cos, b_sin = tl.split(points(tables[2], b_codes, 0))
    b_energy = b_low * b_low + b_high * b_high
    b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(1, len(META.levels)):
        # The circle has as many boundaries as codes, each deeper level one less.
        b_codes, b_energy = deeper_codes(b_energy, tables[1], META.levels[i].bits, META.levels[i].start - i + 1)
        for plane in tl.static_range(planes(META.levels[i].bits)):
            store_whole(b_codes, tile, META, i, plane)
        b_levels = b_levels + (b_codes,)
        b_low, b_high = halves(b_cross)
        b_cos, b_sin = tl.split(points(tables[2], b_codes, META.levels[i].start))
        b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(len(META.levels)):
        for plane in tl.static_range(planes(META.levels[i].bits)):
            store_shared(b_levels, tile, META, i, plane)
    store_radii(b_energy, b_cross, tile, META)


def polarquant_recursive_encoder(
    tree: PolarTree, books: tuple[AngleCodebook, ...], rows: torch.Tensor, scalar: Scalar,
    radius_range: torch.Tensor | None, mean: torch.Tensor | None,
) -> KernelEncoder:  # fmt: skip
    """Encoder of trees along `rows` `[H or 1, D, D]` of tokens less the `mean` `[H, D]` of keys, if any.

    radius_range: first logarithm and step of 8-bit radii, `[H, 2]`, or None for radii in 16 bits.
    """
    stride = rows.stride(0) if len(rows) > 1 else 0
    meta = EncodedTree(
        *padding(tree.head_dim), tree.roots, books[0].lower, SCALARS.index(scalar), radius_range is not None,
        mean is not None, stride, tree.levels,
    )  # fmt: skip
    bounds, table = (torch.cat([getattr(book, name) for book in books]) for name in ("bounds", "points"))
    tables = (rows, bounds, table, bounds if radius_range is None else radius_range, bounds if mean is None else mean)
    return KernelEncoder(encode_tree, meta, tables)
