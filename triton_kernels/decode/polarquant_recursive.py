"""Recursive PolarQuant's device functions (Han et al., Algorithm 1; see `codecs/quantizers/polar_tree.py`).

    a tile of tokens, from the roots down:  r_(ℓ-1) = [r_ℓ cos θ_ℓ | r_ℓ sin θ_ℓ],  ℓ = L, ..., 1
    score:       s[t] = ⟨q_low, r_1 cos θ_1⟩ + ⟨q_high, r_1 sin θ_1⟩
    accumulate:  acc_low += p r_1 cos θ_1,  acc_high += p r_1 sin θ_1

A single radius per token stays out of the tree: it multiplies the score and the weight. With coordinate i numbered
`i // ODD * PAD + i % ODD`, ODD the odd part of the head dimension and PAD its next power of two, all tiles are powers
of two and pairing by halves stays as it is. `polar_columns.py` has a faster path for 128 channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, PolarTree
from kvcache_compress.triton_kernels.common import assembly
from kvcache_compress.triton_kernels.common.codes import load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, with_mean

from . import polar_columns


class Tree(NamedTuple):
    """Odd part of the head dimension, padded to a power of two, roots, field of the radii, and levels.

    coded: True if radii have 8 bits; fast: True if `polar_columns.py` undoes the tree; keys: True on the side of keys.
    By level: the members of `LevelCodes`, and the start of its entries in the joined tables.
    """

    odd: int
    padded: int
    roots: int
    radii: int
    coded: bool
    fast: bool
    keys: bool
    bits: tuple[int, ...]
    field: tuple[int, ...]
    row: tuple[int, ...]
    offset: tuple[int, ...]
    words: tuple[int, ...]
    base: tuple[int, ...]
    count: tuple[int, ...]
    start: tuple[int, ...]


@triton.jit
def level_codes(fields, o_row, o_t, m_t, META: tl.constexpr, AT: tl.constexpr):
    """Load the codes of level `AT`, counted from 0: int32 `[T, COUNT // ODD * PAD]`."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    BITS: tl.constexpr = META.bits[AT]
    FIELD: tl.constexpr = META.field[AT]
    WORDS: tl.constexpr = META.words[AT]
    BASE: tl.constexpr = META.base[AT]
    SIZE: tl.constexpr = META.count[AT] // ODD * PAD
    WHOLE: tl.constexpr = META.count[AT] == 8 * WORDS
    LOW: tl.constexpr = 4 if BITS >= 4 else (2 if BITS >= 2 else 1)
    o_c = tl.arange(0, SIZE // 8 if WHOLE else SIZE)
    m_w = m_t[:, None]
    if PAD != ODD:
        m_w = m_w & (o_c % PAD < ODD)[None, :]
    o_i = o_c // PAD * ODD + o_c % PAD
    if WHOLE:
        o_w, o_j = o_i, tl.arange(0, 8)[None, :, None]
    else:
        o_w, o_j = (BASE + o_i) % WORDS, ((BASE + o_i) // WORDS)[None, :]
    o_w = (o_row + o_t)[:, None] * META.row[AT] + META.offset[AT] + o_w[None, :]
    b_low = tl.load(fields[FIELD] + o_w, mask=m_w, other=0).to(tl.int32)
    if WHOLE:
        b_low = b_low[:, None, :]
    b_codes = (b_low >> (LOW * o_j)) & (2**LOW - 1)
    if BITS > LOW:
        HIGH: tl.constexpr = BITS - LOW
        b_high = tl.load(fields[FIELD + 1] + o_w, mask=m_w, other=0).to(tl.int32)
        if WHOLE:
            b_high = b_high[:, None, :]
        b_codes |= ((b_high >> (HIGH * o_j)) & (2**HIGH - 1)) << LOW
    return tl.reshape(b_codes, [o_t.shape[0], SIZE])


@triton.jit
def points(p_points, b_codes, START: tl.constexpr):
    """Look up cos and sin of codes `[T, W]` with one load: `[T, W, 2]`."""
    return tl.load(p_points + ((START + b_codes) * 2)[:, :, None] + tl.arange(0, 2)[None, None, :])


@triton.jit
def halves(b_x):
    """Low and high half of `[T, W]`."""
    T: tl.constexpr = b_x.shape[0]
    return tl.split(tl.permute(tl.reshape(b_x, [T, 2, b_x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def decoded_radii(b_radii, tables, i_h, META: tl.constexpr):
    """Stored radii as float32; 8-bit ones through their head's table."""
    if META.coded:
        p_table = tables[1].to(tl.pointer_type(tl.float32), bitcast=True) + i_h * 256
        b_radii = tl.load(p_table + b_radii.to(tl.int32))
    return b_radii.to(tl.float32)


@triton.jit
def tree_tile(fields, tables, i_h, o_row, o_t, m_t, META: tl.constexpr, DTYPE: tl.constexpr):
    """Decode a tile from the roots down: low and high half `[T, W]` in code space, a single root of radius 1."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    ROOTS: tl.constexpr = META.roots
    DEPTH: tl.constexpr = len(META.bits)
    SINGLE: tl.constexpr = ROOTS == 1
    if not SINGLE:
        o_r = tl.arange(0, ROOTS // ODD * PAD)
        o_i = o_r // PAD * ODD + o_r % PAD
        m_r = m_t[:, None] & (o_r % PAD < ODD)[None, :]
        b_r = tl.load(fields[META.radii] + (o_row + o_t)[:, None] * ROOTS + o_i[None, :], mask=m_r, other=0)
        b_r = decoded_radii(b_r, tables, i_h, META)
    for i in tl.static_range(DEPTH):
        b_codes = level_codes(fields, o_row, o_t, m_t, META, DEPTH - 1 - i)
        b_pair = points(tables[0], b_codes, META.start[DEPTH - 1 - i])
        if i > 0 or not SINGLE:
            b_pair = b_pair * (b_r[:, :, None] if i < DEPTH - 1 else b_r.to(DTYPE)[:, :, None])
        if i < DEPTH - 1:
            b_pair = b_pair.to(tl.float32)
            b_r = tl.reshape(tl.permute(b_pair, [0, 2, 1]), [o_t.shape[0], 2 * b_codes.shape[1]])
    return tl.split(b_pair.to(DTYPE))


@triton.jit
def tiles(
    fields, tables, words, i_h, o_row, o_t, m_t, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Decode two tiles of code space, or eight of 16 columns, and the radius per token left out of the tree."""
    if FAST and META.fast:
        b_tiles = polar_columns.column_tiles(fields, tables[2 if META.coded else 1], words, o_row, o_t, m_t, META)
    else:
        b_low, b_high = tree_tile(fields, tables, i_h, o_row, o_t, m_t, META, DTYPE)
        b_tiles = (b_low, b_high)
        if META.fast:
            b_0, b_2 = halves(b_low)
            b_4, b_6 = halves(b_high)
            b_lows, b_highs = halves(b_0) + halves(b_2), halves(b_4) + halves(b_6)
            b_tiles = ()
            for i in tl.static_range(4):
                b_near_low, b_far_low = halves(b_lows[i])
                b_near_high, b_far_high = halves(b_highs[i])
                b_tiles = b_tiles + (
                    polar_columns.beside(b_near_low, b_near_high, META.keys),
                    polar_columns.beside(b_far_low, b_far_high, META.keys),
                )
    b_scale = tl.full([o_t.shape[0]], 1.0, tl.float32)
    if META.roots == 1:
        b_scale = decoded_radii(load_scales(fields[META.radii], o_row, o_t, m_t), tables, i_h, META)
    return b_tiles, b_scale


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s[t] = ⟨q_low, r_1 cos θ_1⟩ + ⟨q_high, r_1 sin θ_1⟩"""
    b_tiles, b_scale = tiles(fields, tables, words, i_h, o_row, o_t, m_t, META, b_q[0].dtype, FAST)
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(b_tiles)):
        b_s = tl.dot(b_tiles[i], b_q[i], b_s, input_precision="ieee")
    return b_s * b_scale[:, None]


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc_low += p r_1 cos θ_1,  acc_high += p r_1 sin θ_1"""
    b_tiles, b_scale = tiles(fields, tables, words, i_h, o_row, o_t, m_t, META, DTYPE, FAST)
    if META.roots != 1:
        b_weights = b_p.to(DTYPE)
    elif FAST:
        b_weights = assembly.product(b_p.to(DTYPE), b_scale.to(DTYPE)[:, None])
    else:
        b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_sums = ()
    for i in tl.static_range(len(b_tiles)):
        b_sums = b_sums + (tl.dot(tl.trans(b_tiles[i]), b_weights, b_acc[i], input_precision="ieee"),)
    return b_sums


def padding(head_dim: int) -> tuple[int, int]:
    """Odd part of the head dimension, and the power of two that it is padded to in tiles."""
    odd = head_dim // (head_dim & -head_dim)
    return odd, triton.next_power_of_2(odd)


def level_columns(tree: PolarTree) -> tuple[tuple[int, ...], ...]:
    """Per-level members of `Tree`, from `bits` on."""
    rows, start = [], 0
    for level in tree.levels:
        rows.append((level.bits, level.field, level.row, level.offset, level.words, level.base, level.count, start))
        start += 2**level.bits
    return tuple(zip(*rows, strict=True))


def polarquant_recursive_side(
    side: Side, tree: PolarTree, books: tuple[AngleCodebook, ...], basis: torch.Tensor,
    radius_table: torch.Tensor | None, mean: torch.Tensor | None,
) -> KernelSide:  # fmt: skip
    """Kernel operands of trees along `basis` `[H or 1, D, D]`, and the keys' `mean` `[H, D]`, if any.

    radius_table: float32 `[H, 256]`, radii of 8-bit codes, or None for radii in 16 bits.
    """
    dim, device, keys, coded = tree.head_dim, basis.device, side == "keys", radius_table is not None
    odd, pad = padding(dim)
    width = dim // odd * pad
    channel = torch.arange(dim, device=device)
    padded = torch.zeros(len(basis), width, dim, device=device)
    padded[:, channel // odd * pad + channel % odd] = basis
    tables = (torch.cat([book.points for book in books]),)
    if radius_table is not None:  # as integers, which are not cast: numbers of 32 bits are prefetched
        tables += (radius_table.float().contiguous().view(torch.int32),)
    fast = polar_columns.fits(tree, coded)
    if fast:
        padded = padded[:, polar_columns.tile_order(keys).to(device)]
        coarse = polar_columns.coarse_table(books) if tree.roots == 1 else polar_columns.odd_rows()
        tables += (coarse.to(device),)
    radii = sum(len(PLANES[bits]) for bits, _ in tree.widths)
    return KernelSide(
        score if keys else accumulate,
        Tree(odd, pad, tree.roots, radii, coded, fast, keys, *level_columns(tree)),
        (16,) * 8 if fast else (width // 2, width // 2),
        tables=tables,
        words=polar_columns.words(books).to(device) if fast else None,
        places=(8 if tree.roots == 1 else 16) if fast else 0,
        tokens=16 if fast else 32,
        warps=1 if fast else 2,
        matrix=with_mean(padded.mT, mean) if keys else padded,
        by_head=(1,) if coded else (),
    )
