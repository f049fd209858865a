"""Recursive PolarQuant's encoder: rotation, codes of all levels and radii in one launch (Han et al., Algorithm 1).

The codes are those of `encode` in `codecs/quantizers/polar_tree.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, PolarTree
from kvcache_compress.codecs.quantizers.scalar import Scalar
from kvcache_compress.triton_kernels.common.operands import KernelEncoder
from kvcache_compress.triton_kernels.decode.polarquant_recursive import halves, level_columns, padding, points

from .rotate import rotated
from .turboquant import SCALARS, UNBIASED


class EncodedTree(NamedTuple):
    """Odd part of the head dimension, padded odd part, roots, boundaries of the circle below π, the stored scalar.

    coded: True if radii have 8 bits; centred: True if keys are centred; stride: head stride of the rows. By
    level: as in `Tree`, and the index of its first boundary. By plane in which coarse levels share words: the members
    that `shared_columns` lists.
    """

    odd: int
    padded: int
    roots: int
    lower: int
    scalar: int
    coded: bool
    centred: bool
    stride: int
    bits: tuple[int, ...]
    field: tuple[int, ...]
    row: tuple[int, ...]
    offset: tuple[int, ...]
    words: tuple[int, ...]
    base: tuple[int, ...]
    count: tuple[int, ...]
    start: tuple[int, ...]
    bound: tuple[int, ...]
    shared_field: tuple[int, ...]
    shared_first: tuple[int, ...]
    shared_bits: tuple[int, ...]
    shared_shift: tuple[int, ...]
    shared_row: tuple[int, ...]
    shared_offset: tuple[int, ...]
    shared_words: tuple[int, ...]


@triton.jit
def store_plane(
    b_codes, p_plane, o_n, m_n, SHIFT: tl.constexpr, PLANE: tl.constexpr, META: tl.constexpr, AT: tl.constexpr
):
    """Pack bits `[SHIFT, SHIFT + PLANE)` of the codes of level `AT`, int32 `[T, 8 * words]`, into their plane."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    SIZE: tl.constexpr = META.words[AT] // ODD * PAD
    b_parts = (tl.reshape(b_codes, [b_codes.shape[0], 8, SIZE]) >> SHIFT) & (2**PLANE - 1)
    b_words = tl.sum(b_parts << (PLANE * tl.arange(0, 8))[None, :, None], 1)
    o_c = tl.arange(0, SIZE)
    o_w = o_n[:, None] * META.row[AT] + META.offset[AT] + (o_c // PAD * ODD + o_c % PAD)[None, :]
    m_w = m_n[:, None] & (o_c % PAD < ODD)[None, :]
    tl.store(p_plane + o_w, b_words.to(p_plane.dtype.element_ty), mask=m_w)


@triton.jit
def store_whole(b_codes, fields, o_n, m_n, META: tl.constexpr, AT: tl.constexpr):
    """Store level `AT`, if it fills whole words."""
    BITS: tl.constexpr = META.bits[AT]
    FIELD: tl.constexpr = META.field[AT]
    LOW: tl.constexpr = 4 if BITS >= 4 else (2 if BITS >= 2 else 1)
    if META.count[AT] == 8 * META.words[AT]:
        store_plane(b_codes, fields[FIELD], o_n, m_n, 0, LOW, META, AT)
        if BITS > LOW:
            store_plane(b_codes, fields[FIELD + 1], o_n, m_n, LOW, BITS - LOW, META, AT)


@triton.jit
def word_part(
    b_codes, WORD: tl.constexpr, PLANE: tl.constexpr, SHIFT: tl.constexpr, META: tl.constexpr, AT: tl.constexpr
):
    """Bits that the codes of level `AT`, int32 `[T, W]`, contribute to its shared word `WORD`: int32 `[T]`."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    WORDS: tl.constexpr = META.words[AT]
    o_c = tl.arange(0, b_codes.shape[1])
    o_i = META.base[AT] + o_c // PAD * ODD + o_c % PAD
    m_i = (o_c % PAD < ODD) & (o_i % WORDS == WORD)
    b_part = ((b_codes >> SHIFT) & (2**PLANE - 1)) << (PLANE * (o_i // WORDS))[None, :]
    return tl.sum(tl.where(m_i[None, :], b_part, 0), 1)


@triton.jit
def store_shared(b_levels, fields, o_n, m_n, META: tl.constexpr, PLACE: tl.constexpr):
    """Store the words that coarse levels share in one plane."""
    WORDS: tl.constexpr = META.shared_words[PLACE]
    for w in tl.static_range(WORDS):
        b_word = tl.zeros([o_n.shape[0]], tl.int32)
        for i in tl.static_range(len(b_levels)):
            if META.field[i] == META.shared_first[PLACE] and META.count[i] != 8 * META.words[i]:
                b_word += word_part(b_levels[i], w, META.shared_bits[PLACE], META.shared_shift[PLACE], META, i)
        p_word = fields[META.shared_field[PLACE]] + o_n * META.shared_row[PLACE] + META.shared_offset[PLACE] + w
        tl.store(p_word, b_word.to(p_word.dtype.element_ty), mask=m_n)


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
def store_radii(b_energy, b_cross, p_radii, p_range, o_row, m_t, i_h, META: tl.constexpr):
    """Store the radii of the roots, from squared radii and inner products with code points; 8-bit ones by logarithm."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    ROOTS: tl.constexpr = META.roots
    SCALAR: tl.constexpr = META.scalar
    if SCALAR == UNBIASED:
        b_radii = tl.div_rn(b_energy, tl.maximum(b_cross, 1e-30))
    elif SCALAR > UNBIASED:
        b_radii = b_cross
    else:
        b_radii = tl.sqrt_rn(b_energy)
    o_r = tl.arange(0, ROOTS // ODD * PAD)
    o_i = o_row[:, None] * ROOTS + (o_r // PAD * ODD + o_r % PAD)[None, :]
    m_i = m_t[:, None] & (o_r % PAD < ODD)[None, :]
    if META.coded:
        b_logs = tl.log2(tl.maximum(b_radii, 1e-30))
        b_steps = (b_logs - tl.load(p_range + 2 * i_h)) / tl.load(p_range + 2 * i_h + 1)
        b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5) + 1.0, 0.0), 255.0)
        b_radii = tl.where(b_radii > 0, b_codes, 0.0)
    else:
        b_radii = tl.minimum(b_radii, 65504.0)
    tl.store(p_radii + o_i, b_radii.to(p_radii.dtype.element_ty), mask=m_i)


@triton.jit
def encode_tree(
    p_x, o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h, D: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode all levels, from the first on (Algorithm 1).

    `tables` are rows `[H or 1, D, D]`, boundaries and points of all levels, least logarithm and step of 8-bit radii
    `[H, 2]`, and the mean `[H, D]`. With products not fused with sums but rounded as in torch, all codes follow from
    the rotated numbers to the bit.
    """
    DEPTH: tl.constexpr = len(META.bits)
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    o_c = tl.arange(0, D // 2 // ODD * PAD)
    o_y, m_y = o_c // PAD * ODD + o_c % PAD, o_c % PAD < ODD
    p_rows, p_mean = tables[0] + i_h * META.stride, tables[4] + i_h * D
    b_low = rotated(p_x, o_x, m_t, p_rows, o_y, m_y, p_mean, D, META.centred, PRECISION)
    b_high = rotated(p_x, o_x, m_t, p_rows, D // 2 + o_y, m_y, p_mean, D, META.centred, PRECISION)
    b_codes = circle_codes(b_low, b_high, tables[1], META.bits[0], META.lower)
    store_whole(b_codes, fields, o_row, m_t, META, 0)
    b_levels = (b_codes,)
    b_cos, b_sin = tl.split(points(tables[2], b_codes, 0))
    b_energy = b_low * b_low + b_high * b_high
    b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(1, DEPTH):
        b_codes, b_energy = deeper_codes(b_energy, tables[1], META.bits[i], META.bound[i])
        store_whole(b_codes, fields, o_row, m_t, META, i)
        b_levels = b_levels + (b_codes,)
        b_low, b_high = halves(b_cross)
        b_cos, b_sin = tl.split(points(tables[2], b_codes, META.start[i]))
        b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(len(META.shared_field)):
        store_shared(b_levels, fields, o_row, m_t, META, i)
    store_radii(b_energy, b_cross, fields[len(fields) - 1], tables[3], o_row, m_t, i_h, META)


def shared_columns(tree: PolarTree) -> tuple[tuple[int, ...], ...]:
    """Members of `EncodedTree` for each plane in which coarse levels share words.

    Field, field of the low plane, bits of the plane, bits below it, words of a token, first shared word, shared words.
    """
    shared, field = [], 0
    for bits, _ in tree.widths:
        shift, first = 0, field
        coarse = [level for level in tree.levels if level.bits == bits and not level.fills_words]
        for plane in PLANES[bits]:
            if coarse:
                shared.append((field, first, plane, shift, coarse[0].row, coarse[0].offset, coarse[0].words))
            field += 1
            shift += plane
    return tuple(zip(*shared, strict=True)) or ((),) * 7


def polarquant_recursive_encoder(
    tree: PolarTree, books: tuple[AngleCodebook, ...], rows: torch.Tensor, scalar: Scalar,
    radius_range: torch.Tensor | None, mean: torch.Tensor | None,
) -> KernelEncoder:  # fmt: skip
    """Encoder of trees along `rows` `[H or 1, D, D]` of tokens less the `mean` `[H, D]` of keys, if any.

    radius_range: first logarithm and step of 8-bit radii, `[H, 2]`, or None for radii in 16 bits.
    """
    bound = tuple(sum(len(book.bounds) for book in books[:level]) for level in range(len(books)))
    stride = rows.stride(0) if len(rows) > 1 else 0
    meta = EncodedTree(
        *padding(tree.head_dim), tree.roots, books[0].lower, SCALARS.index(scalar), radius_range is not None,
        mean is not None, stride, *level_columns(tree), bound, *shared_columns(tree),
    )  # fmt: skip
    bounds, table = (torch.cat([getattr(book, name) for book in books]) for name in ("bounds", "points"))
    tables = (rows, bounds, table, bounds if radius_range is None else radius_range, bounds if mean is None else mean)
    return KernelEncoder(encode_tree, meta, tables)
