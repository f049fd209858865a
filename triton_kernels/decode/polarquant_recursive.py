"""Recursive PolarQuant's device functions (Han et al., Algorithm 1; see `codecs/quantizers/polar_tree.py`).

    a tile of tokens, from the roots down:  r_(ℓ-1) = [r_ℓ cos θ_ℓ | r_ℓ sin θ_ℓ],  ℓ = L, ..., 1
    score:       s[t] = ⟨q_low, r_1 cos θ_1⟩ + ⟨q_high, r_1 sin θ_1⟩
    accumulate:  acc_low += p r_1 cos θ_1,  acc_high += p r_1 sin θ_1

A single radius per token stays out of the tree: it multiplies the score and the weight. With coordinate i numbered
`i // ODD * PAD + i % ODD`, ODD the odd part of the head dimension and PAD its next power of two, all tiles are powers
of two and pairing by halves stays as it is. `polar_columns.py` has a faster path for 128 channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, LevelCodes, PolarTree
from kvcache_compress.triton_kernels.common import assembly
from kvcache_compress.triton_kernels.common.codes import fields_of, load_scales, planes
from kvcache_compress.triton_kernels.common.operands import KernelSide, with_mean

from . import polar_columns


class Tree(NamedTuple):
    """Odd part of the head dimension, padded to a power of two, roots, field of the radii, and levels, finest first.

    coded: True if radii have 8 bits; fast: True if `polar_columns.py` undoes the tree; keys: True on the side of keys.
    """

    odd: int
    padded: int
    roots: int
    radii: int
    coded: bool
    fast: bool
    keys: bool
    levels: tuple[LevelCodes, ...]


@triton.jit
def level_codes(tile, META: tl.constexpr, AT: tl.constexpr):
    """Load the codes of level `AT`, counted from 0: int32 `[T, COUNT // ODD * PAD]`."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    LEVEL: tl.constexpr = META.levels[AT]
    SIZE: tl.constexpr = LEVEL.count // ODD * PAD
    WHOLE: tl.constexpr = LEVEL.count == 8 * LEVEL.words
    o_c = tl.arange(0, SIZE // 8 if WHOLE else SIZE)
    m_w = tile.m_t[:, None]
    if PAD != ODD:
        m_w = m_w & (o_c % PAD < ODD)[None, :]
    o_i = o_c // PAD * ODD + o_c % PAD
    if WHOLE:
        o_w, o_j = o_i, tl.arange(0, 8)[None, :, None]
    else:
        o_w, o_j = (LEVEL.base + o_i) % LEVEL.words, ((LEVEL.base + o_i) // LEVEL.words)[None, :]
    o_w = (tile.o_row + tile.o_t)[:, None] * LEVEL.row + LEVEL.offset + o_w[None, :]
    b_low = tl.load(tile.fields[LEVEL.field] + o_w, mask=m_w, other=0).to(tl.int32)
    b_high = b_low
    if planes(LEVEL.bits) > 1:
        b_high = tl.load(tile.fields[LEVEL.field + 1] + o_w, mask=m_w, other=0).to(tl.int32)
    if WHOLE:
        b_low, b_high = b_low[:, None, :], b_high[:, None, :]
    return tl.reshape(fields_of(b_low, b_high, o_j, LEVEL.bits), [tile.o_t.shape[0], SIZE])


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
def decoded_radii(b_radii, tile, META: tl.constexpr):
    """Stored radii as float32; 8-bit ones through their head's table."""
    if META.coded:
        p_table = tile.tables[1].to(tl.pointer_type(tl.float32), bitcast=True) + tile.i_h * 256
        b_radii = tl.load(p_table + b_radii.to(tl.int32))
    return b_radii.to(tl.float32)


@triton.jit
def tree_tile(tile, META: tl.constexpr, DTYPE: tl.constexpr):
    """Decode a tile from the roots down: low and high half `[T, W]` in code space, a single root of radius 1."""
    ODD: tl.constexpr = META.odd
    PAD: tl.constexpr = META.padded
    ROOTS: tl.constexpr = META.roots
    DEPTH: tl.constexpr = len(META.levels)
    SINGLE: tl.constexpr = ROOTS == 1
    if not SINGLE:
        o_r = tl.arange(0, ROOTS // ODD * PAD)
        o_i = (tile.o_row + tile.o_t)[:, None] * ROOTS + (o_r // PAD * ODD + o_r % PAD)[None, :]
        m_r = tile.m_t[:, None] & (o_r % PAD < ODD)[None, :]
        b_r = decoded_radii(tl.load(tile.fields[META.radii] + o_i, mask=m_r, other=0), tile, META)
    for i in tl.static_range(DEPTH):
        b_codes = level_codes(tile, META, DEPTH - 1 - i)
        b_pair = points(tile.tables[0], b_codes, META.levels[DEPTH - 1 - i].start)
        if i > 0 or not SINGLE:
            b_pair = b_pair * (b_r[:, :, None] if i < DEPTH - 1 else b_r.to(DTYPE)[:, :, None])
        if i < DEPTH - 1:
            b_pair = b_pair.to(tl.float32)
            b_r = tl.reshape(tl.permute(b_pair, [0, 2, 1]), [tile.o_t.shape[0], 2 * b_codes.shape[1]])
    return tl.split(b_pair.to(DTYPE))


@triton.jit
def tiles(tile, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Decode two tiles of code space, or eight of 16 columns, and the radius per token left out of the tree."""
    if FAST and META.fast:
        b_tiles = polar_columns.column_tiles(tile, META)
    else:
        b_low, b_high = tree_tile(tile, META, DTYPE)
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
    b_scale = tl.full([tile.o_t.shape[0]], 1.0, tl.float32)
    if META.roots == 1:
        b_scale = decoded_radii(load_scales(tile.fields[META.radii], tile), tile, META)
    return b_tiles, b_scale


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = ⟨q_low, r_1 cos θ_1⟩ + ⟨q_high, r_1 sin θ_1⟩"""
    b_tiles, b_scale = tiles(tile, META, b_q[0].dtype, FAST)
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(b_tiles)):
        b_s = tl.dot(b_tiles[i], b_q[i], b_s, input_precision="ieee")
    return b_s * b_scale[:, None]


@triton.jit
def accumulate(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """acc_low += p r_1 cos θ_1,  acc_high += p r_1 sin θ_1"""
    b_tiles, b_scale = tiles(tile, META, DTYPE, FAST)
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
    fast = polar_columns.fits(tree)
    if fast:
        padded = padded[:, polar_columns.tile_order(keys).to(device)]
        tables += (polar_columns.coarse_table(books).to(device),)
    radii = sum(len(PLANES[bits]) for bits, _ in tree.widths)
    return KernelSide(
        score if keys else accumulate,
        Tree(odd, pad, tree.roots, radii, coded, fast, keys, tree.levels),
        (16,) * 8 if fast else (width // 2, width // 2),
        tables=tables,
        words=polar_columns.words(books).to(device) if fast else None,
        places=8 if fast else 0,
        tokens=16 if fast else 32,
        warps=1 if fast else 2,
        matrix=with_mean(padded.mT, mean) if keys else padded,
        by_head=(1,) if coded else (),
    )
