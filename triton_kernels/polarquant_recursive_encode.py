"""Recursive PolarQuant's encode kernel (Han et al., Algorithm 1); the twin of `polar_tree.encode`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..layout import PLANE_WORD, PLANES
from ..polar_codebooks import AngleCodebook
from ..polar_tree import PolarTree
from .operands import launch_options
from .polarquant_recursive import halves, level_meta, padding, points


@triton.jit
def store_plane(
    b_codes, p_plane, o_n, m_n, SHIFT: tl.constexpr, PLANE: tl.constexpr,
    LEVELS: tl.constexpr, AT: tl.constexpr, ODD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Packs bits `[SHIFT, SHIFT + PLANE)` of level `AT`, int32 `[T, 8 * words]`, into their plane."""
    LEVEL: tl.constexpr = LEVELS[AT]
    SIZE: tl.constexpr = LEVEL[4] // ODD * PAD
    b_parts = (tl.reshape(b_codes, [b_codes.shape[0], 8, SIZE]) >> SHIFT) & (2**PLANE - 1)
    b_words = tl.sum(b_parts << (PLANE * tl.arange(0, 8))[None, :, None], 1)
    o_c = tl.arange(0, SIZE)
    o_w = o_n[:, None] * LEVEL[2] + LEVEL[3] + (o_c // PAD * ODD + o_c % PAD)[None, :]
    m_w = m_n[:, None] & (o_c % PAD < ODD)[None, :]
    tl.store(p_plane + o_w, b_words.to(p_plane.dtype.element_ty), mask=m_w)


@triton.jit
def store_whole(
    b_codes, fields, o_n, m_n, LEVELS: tl.constexpr, AT: tl.constexpr, ODD: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Stores level `AT`, which has whole words."""
    LEVEL: tl.constexpr = LEVELS[AT]
    LOW: tl.constexpr = 4 if LEVEL[0] >= 4 else (2 if LEVEL[0] >= 2 else 1)
    store_plane(b_codes, fields[LEVEL[1]], o_n, m_n, 0, LOW, LEVELS, AT, ODD, PAD)
    if LEVEL[0] > LOW:
        store_plane(b_codes, fields[LEVEL[1] + 1], o_n, m_n, LOW, LEVEL[0] - LOW, LEVELS, AT, ODD, PAD)


@triton.jit
def word_part(
    b_codes, WORD: tl.constexpr, PLANE: tl.constexpr, SHIFT: tl.constexpr, LEVELS: tl.constexpr, AT: tl.constexpr,
    ODD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """What the codes of level `AT`, int32 `[T, W]`, add to word `WORD` of those that it shares: int32 `[T]`."""
    LEVEL: tl.constexpr = LEVELS[AT]
    o_c = tl.arange(0, b_codes.shape[1])
    o_i = LEVEL[5] + o_c // PAD * ODD + o_c % PAD
    m_i = (o_c % PAD < ODD) & (o_i % LEVEL[4] == WORD)
    b_part = ((b_codes >> SHIFT) & (2**PLANE - 1)) << (PLANE * (o_i // LEVEL[4]))[None, :]
    return tl.sum(tl.where(m_i[None, :], b_part, 0), 1)


@triton.jit
def store_shared(
    b_levels, fields, o_n, m_n, LEVELS: tl.constexpr, PLACES: tl.constexpr, PLACE: tl.constexpr,
    ODD: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Stores the words that coarse levels share in one plane: number `PLACE` of `SHARED` in `encode_arguments`."""
    SHARED: tl.constexpr = PLACES[PLACE]
    WORDS: tl.constexpr = SHARED[6]
    for w in tl.static_range(WORDS):
        b_word = tl.zeros([o_n.shape[0]], tl.int32)
        for i in tl.static_range(len(LEVELS)):
            if LEVELS[i][1] == SHARED[1] and LEVELS[i][6] != 8 * LEVELS[i][4]:
                b_word += word_part(b_levels[i], w, SHARED[2], SHARED[3], LEVELS, i, ODD, PAD)
        p_word = fields[SHARED[0]] + o_n * SHARED[4] + SHARED[5] + w
        tl.store(p_word, b_word.to(p_word.dtype.element_ty), mask=m_n)


@triton.jit
def circle_codes(b_x, b_y, p_bounds, BITS: tl.constexpr, LOWER: tl.constexpr):
    """Nearest codes on the circle: the number of boundaries below each angle (see `polar_tree.circle_codes`)."""
    b_codes = tl.zeros(b_x.shape, tl.int32)
    m_beyond = b_y < 0
    for i in tl.static_range(2**BITS):
        m_turned = b_y * tl.load(p_bounds + 2 * i) > b_x * tl.load(p_bounds + 2 * i + 1)
        b_codes += ((m_beyond | m_turned) if i < LOWER else (m_beyond & m_turned)).to(tl.int32)
    return b_codes & (2**BITS - 1)


@triton.jit(do_not_specialize=("N",))
def encode_kernel(
    p_y, fields, p_energy, p_cross, p_bounds, p_points, N,
    LEVELS: tl.constexpr, SHARED: tl.constexpr, BOUNDS: tl.constexpr, LOWER: tl.constexpr, D: tl.constexpr,
    ODD: tl.constexpr, PAD: tl.constexpr, ROOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of all levels, packed; squared radii of the roots and inner products with their code points.

    Compiled without fused multiply-add, products and sums are rounded as in torch, and codes equal to the bit.
    """
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_c = tl.arange(0, D // 2 // ODD * PAD)
    o_y = o_n[:, None] * D + (o_c // PAD * ODD + o_c % PAD)[None, :]
    m_y = m_n[:, None] & (o_c % PAD < ODD)[None, :]
    b_low = tl.load(p_y + o_y, mask=m_y, other=0.0)
    b_high = tl.load(p_y + o_y + D // 2, mask=m_y, other=0.0)
    b_codes = circle_codes(b_low, b_high, p_bounds, LEVELS[0][0], LOWER)
    b_levels = (b_codes,)
    b_cos, b_sin = tl.split(points(p_points, b_codes, 0))
    b_energy = b_low * b_low + b_high * b_high
    b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(1, len(LEVELS)):
        b_below, b_above = halves(b_energy)
        b_codes = tl.zeros(b_below.shape, tl.int32)
        for j in tl.static_range(2 ** LEVELS[i][0] - 1):
            p_bound = p_bounds + 2 * (BOUNDS[i] + j)
            b_codes += (b_above * tl.load(p_bound) > b_below * tl.load(p_bound + 1)).to(tl.int32)
        b_levels = b_levels + (b_codes,)
        b_energy = b_below + b_above
        b_low, b_high = halves(b_cross)
        b_cos, b_sin = tl.split(points(p_points, b_codes, LEVELS[i][7]))
        b_cross = b_low * b_cos + b_high * b_sin
    for i in tl.static_range(len(LEVELS)):
        if LEVELS[i][6] == 8 * LEVELS[i][4]:
            store_whole(b_levels[i], fields, o_n, m_n, LEVELS, i, ODD, PAD)
    for i in tl.static_range(len(SHARED)):
        store_shared(b_levels, fields, o_n, m_n, LEVELS, SHARED, i, ODD, PAD)
    o_r = tl.arange(0, ROOTS // ODD * PAD)
    o_i = o_n[:, None] * ROOTS + (o_r // PAD * ODD + o_r % PAD)[None, :]
    m_i = m_n[:, None] & (o_r % PAD < ODD)[None, :]
    tl.store(p_energy + o_i, b_energy, mask=m_i)
    tl.store(p_cross + o_i, b_cross, mask=m_i)


def quantize(
    y: torch.Tensor, tree: PolarTree, books: tuple[AngleCodebook, ...]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """`polar_tree.encode` by the kernel: float32 `y` `[..., D]` to planes, squared radii and inner products."""
    grid, arguments, planes = encode_arguments(y, tree, books)
    encode_kernel[grid](**arguments)
    return planes, arguments["p_energy"], arguments["p_cross"]


def encode_arguments(
    y: torch.Tensor, tree: PolarTree, books: tuple[AngleCodebook, ...]
) -> tuple[tuple[int], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Grid and arguments of `encode_kernel`, and the planes that it fills."""
    rows, dim = y.numel() // y.shape[-1], y.shape[-1]
    planes, shared = [], []
    for bits, width in tree.widths:
        shift, first = 0, len(planes)
        coarse = [level for level in tree.levels if level.bits == bits and not level.whole]
        for plane in PLANES[bits]:
            if coarse:
                place = (len(planes), first, plane, shift, coarse[0].row, coarse[0].offset, coarse[0].words)
                shared.append(place)
            planes.append(y.new_empty(*y.shape[:-1], width // 8, dtype=PLANE_WORD[plane]))
            shift += plane
    starts = [0]
    for book in books[:-1]:
        starts.append(starts[-1] + len(book.bounds))
    odd, pad = padding(dim)
    block = 4 if dim > 128 else 8
    roots = (*y.shape[:-1], tree.roots)
    arguments = dict(
        p_y=y.contiguous(), fields=tuple(planes), p_energy=y.new_empty(roots), p_cross=y.new_empty(roots),
        p_bounds=torch.cat([book.bounds for book in books]), p_points=torch.cat([book.points for book in books]),
        N=rows, LEVELS=level_meta(tree), SHARED=tuple(shared), BOUNDS=tuple(starts), LOWER=books[0].lower,
        D=dim, ODD=odd, PAD=pad, ROOTS=tree.roots, BLOCK=block,
        **launch_options(fusion=False),
    )  # fmt: skip
    return (triton.cdiv(rows, block),), arguments, tuple(planes)
