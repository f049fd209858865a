"""Recursive PolarQuant's encoder: rotation, codes of all levels and radii in one launch (Han et al., Algorithm 1).

The codes are those of `polar_tree.encode`. Its functions take all of `META` and numbers into it, since Triton 3.6 takes
no tuple out of another one as an argument: first the tree's own numbers (`encode_tree`), then its levels as in
`level_meta`, each with the place of its first boundary, then the planes in which coarse levels share words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layout import PLANES
from ..polar_tree import PolarTree
from .operands import KernelEncoder
from .polarquant_recursive import halves, level_meta, padding, points
from .rotate import rotated
from .turboquant_encode import SCALARS, UNBIASED

if TYPE_CHECKING:
    from ..methods.polarquant_recursive import PolarQuantRecursiveCodec


@triton.jit
def store_plane(
    b_codes, p_plane, o_n, m_n, SHIFT: tl.constexpr, PLANE: tl.constexpr, META: tl.constexpr, AT: tl.constexpr
):
    """Packs bits `[SHIFT, SHIFT + PLANE)` of level `AT`, int32 `[T, 8 * words]`, into their plane."""
    LEVEL: tl.constexpr = META[1 + AT]
    ODD: tl.constexpr = META[0][1]
    PAD: tl.constexpr = META[0][2]
    SIZE: tl.constexpr = LEVEL[4] // ODD * PAD
    b_parts = (tl.reshape(b_codes, [b_codes.shape[0], 8, SIZE]) >> SHIFT) & (2**PLANE - 1)
    b_words = tl.sum(b_parts << (PLANE * tl.arange(0, 8))[None, :, None], 1)
    o_c = tl.arange(0, SIZE)
    o_w = o_n[:, None] * LEVEL[2] + LEVEL[3] + (o_c // PAD * ODD + o_c % PAD)[None, :]
    m_w = m_n[:, None] & (o_c % PAD < ODD)[None, :]
    tl.store(p_plane + o_w, b_words.to(p_plane.dtype.element_ty), mask=m_w)


@triton.jit
def store_whole(b_codes, fields, o_n, m_n, META: tl.constexpr, AT: tl.constexpr):
    """Stores level `AT`, if it has whole words."""
    LEVEL: tl.constexpr = META[1 + AT]
    LOW: tl.constexpr = 4 if LEVEL[0] >= 4 else (2 if LEVEL[0] >= 2 else 1)
    if LEVEL[6] == 8 * LEVEL[4]:
        store_plane(b_codes, fields[LEVEL[1]], o_n, m_n, 0, LOW, META, AT)
        if LEVEL[0] > LOW:
            store_plane(b_codes, fields[LEVEL[1] + 1], o_n, m_n, LOW, LEVEL[0] - LOW, META, AT)


@triton.jit
def word_part(
    b_codes, WORD: tl.constexpr, PLANE: tl.constexpr, SHIFT: tl.constexpr, META: tl.constexpr, AT: tl.constexpr
):
    """What the codes of level `AT`, int32 `[T, W]`, add to word `WORD` of those that it shares: int32 `[T]`."""
    LEVEL: tl.constexpr = META[1 + AT]
    ODD: tl.constexpr = META[0][1]
    PAD: tl.constexpr = META[0][2]
    o_c = tl.arange(0, b_codes.shape[1])
    o_i = LEVEL[5] + o_c // PAD * ODD + o_c % PAD
    m_i = (o_c % PAD < ODD) & (o_i % LEVEL[4] == WORD)
    b_part = ((b_codes >> SHIFT) & (2**PLANE - 1)) << (PLANE * (o_i // LEVEL[4]))[None, :]
    return tl.sum(tl.where(m_i[None, :], b_part, 0), 1)


@triton.jit
def store_shared(b_levels, fields, o_n, m_n, META: tl.constexpr, PLACE: tl.constexpr):
    """Stores the words that coarse levels share in one plane: `META[PLACE]`, as in `shared_planes`."""
    SHARED: tl.constexpr = META[PLACE]
    WORDS: tl.constexpr = SHARED[6]
    for w in tl.static_range(WORDS):
        b_word = tl.zeros([o_n.shape[0]], tl.int32)
        for i in tl.static_range(len(b_levels)):
            if META[1 + i][1] == SHARED[1] and META[1 + i][6] != 8 * META[1 + i][4]:
                b_word += word_part(b_levels[i], w, SHARED[2], SHARED[3], META, i)
        p_word = fields[SHARED[0]] + o_n * SHARED[4] + SHARED[5] + w
        tl.store(p_word, b_word.to(p_word.dtype.element_ty), mask=m_n)


@triton.jit
def circle_codes(b_x, b_y, p_bounds, BITS: tl.constexpr, LOWER: tl.constexpr):
    """Nearest codes on the circle: the number of boundaries below each angle (see `polar_tree.circle_codes`)."""
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
    """Codes of a deeper level, of the squared radii of the one below, and its own squared radii."""
    b_below, b_above = halves(b_energy)
    b_codes = tl.zeros(b_below.shape, tl.int32)
    for i in tl.static_range(2**BITS - 1):
        p_bound = p_bounds + 2 * (START + i)
        b_codes += (b_above * tl.load(p_bound) > b_below * tl.load(p_bound + 1)).to(tl.int32)
    return b_codes, b_below + b_above


@triton.jit
def store_radii(b_energy, b_cross, p_radii, p_range, o_row, m_t, i_h, META: tl.constexpr):
    """Radii of the roots, of squared radii and inner products with code points; 8-bit ones by their logarithms."""
    ODD: tl.constexpr = META[0][1]
    PAD: tl.constexpr = META[0][2]
    ROOTS: tl.constexpr = META[0][3]
    SCALAR: tl.constexpr = META[0][5]
    if SCALAR == UNBIASED:
        b_radii = tl.div_rn(b_energy, tl.maximum(b_cross, 1e-30))
    elif SCALAR > UNBIASED:
        b_radii = b_cross
    else:
        b_radii = tl.sqrt_rn(b_energy)
    o_r = tl.arange(0, ROOTS // ODD * PAD)
    o_i = o_row[:, None] * ROOTS + (o_r // PAD * ODD + o_r % PAD)[None, :]
    m_i = m_t[:, None] & (o_r % PAD < ODD)[None, :]
    if META[0][6]:
        b_logs = tl.log2(tl.maximum(b_radii, 1e-30))
        b_steps = (b_logs - tl.load(p_range + 2 * i_h)) / tl.load(p_range + 2 * i_h + 1)
        b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5) + 1.0, 0.0), 255.0)
        b_radii = tl.where(b_radii > 0, b_codes, 0.0)
    else:
        b_radii = tl.minimum(b_radii, 65504.0)
    tl.store(p_radii + o_i, b_radii.to(p_radii.dtype.element_ty), mask=m_i)


@triton.jit
def encode_tree(
    p_x, o_x, m_t, fields, o_row, tables, i_h, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr
):
    """`META[0]` is levels, odd part of `D` and its power of two, roots, boundaries of the circle below π, the number of
    the scalar, whether radii have 8 bits, and whether keys are centred.

    `tables` are the basis `[D, D]`, boundaries and points of all levels, the least logarithm and the step of 8-bit
    radii `[H, 2]`, and the mean `[H, D]`. Where products are not fused with sums they are rounded as in torch, and all
    codes follow from the rotated numbers to the bit.
    """
    DEPTH: tl.constexpr = META[0][0]
    ODD: tl.constexpr = META[0][1]
    PAD: tl.constexpr = META[0][2]
    o_c = tl.arange(0, D // 2 // ODD * PAD)
    o_y, m_y = o_c // PAD * ODD + o_c % PAD, o_c % PAD < ODD
    p_mean = tables[4] + i_h * D
    b_low = rotated(p_x, o_x, m_t, tables[0], o_y, m_y, p_mean, D, META[0][7], PRECISION)
    b_high = rotated(p_x, o_x, m_t, tables[0], D // 2 + o_y, m_y, p_mean, D, META[0][7], PRECISION)
    b_codes = circle_codes(b_low, b_high, tables[1], META[1][0], META[0][4])
    store_whole(b_codes, fields, o_row, m_t, META, 0)
    b_levels = (b_codes,)
    b_cos, b_sin = tl.split(points(tables[2], b_codes, 0))
    b_energy = b_low * b_low + b_high * b_high
    b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(1, DEPTH):
        b_codes, b_energy = deeper_codes(b_energy, tables[1], META[1 + i][0], META[1 + i][8])
        store_whole(b_codes, fields, o_row, m_t, META, i)
        b_levels = b_levels + (b_codes,)
        b_low, b_high = halves(b_cross)
        b_cos, b_sin = tl.split(points(tables[2], b_codes, META[1 + i][7]))
        b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(1 + DEPTH, len(META)):
        store_shared(b_levels, fields, o_row, m_t, META, i)
    store_radii(b_energy, b_cross, fields[len(fields) - 1], tables[3], o_row, m_t, i_h, META)


def shared_planes(tree: PolarTree) -> tuple[tuple[int, ...], ...]:
    """Planes in which coarse levels share words: `(field, field of the low plane, bits of the plane, those below it,
    words of a token, where the shared ones begin, how many they are)`."""
    shared, field = [], 0
    for bits, _ in tree.widths:
        shift, first = 0, field
        coarse = [level for level in tree.levels if level.bits == bits and not level.whole]
        for plane in PLANES[bits]:
            if coarse:
                shared.append((field, first, plane, shift, coarse[0].row, coarse[0].offset, coarse[0].words))
            field += 1
            shift += plane
    return tuple(shared)


def polarquant_recursive_encoder(codec: PolarQuantRecursiveCodec) -> KernelEncoder:
    """Of a prepared codec."""
    books, tree, radii = codec.books, codec.tree, codec.radius_table is not None
    starts = [sum(len(book.bounds) for book in books[:level]) for level in range(len(books))]
    levels = tuple((*level, start) for level, start in zip(level_meta(tree), starts, strict=True))
    shape = (
        len(levels), *padding(codec.context.head_dim), tree.roots, books[0].lower, SCALARS.index(codec.scalar), radii,
        codec.mean is not None,
    )  # fmt: skip
    bounds, table = (torch.cat([getattr(book, name) for book in books]) for name in ("bounds", "points"))
    names = "least_log_radius", "log_radius_step"
    spread = torch.stack([codec.statistics[name] for name in names], -1) if radii else bounds
    tables = (codec.basis, bounds, table, spread, bounds if codec.mean is None else codec.mean)
    return KernelEncoder(encode_tree, (shape, *levels, *shared_planes(tree)), tables, fused=False)
