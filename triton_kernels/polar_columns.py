"""The tree of recursive PolarQuant over 128 channels, undone in packed machine instructions.

A tile `[T, 8]` holds eight neighbouring coordinates of code space, or radii of a level, one in each column. Since a
level pairs by halves, and halves are whole tiles down to level 4, undoing one multiplies tiles by tiles: 1 of level 4,
2 of level 3, 4 of level 2 and 8 of level 1 make 16. Code c of a tile of level ℓ lies in a word that depends on the
column; `places` has the shifts that bring it down. The codes of levels 4 to 7, 8 bits to a column, are looked up in
memory at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..polar_codebooks import AngleCodebook
from ..polar_tree import PolarTree
from . import directions, lookup
from .codes import load_words

Registers = tuple[str, str, str, str]


def _tables(first: int, bits: int) -> tuple[Registers, Registers]:
    """Registers of the tables of cos and of sin; Triton hands every constant over twice."""
    words = [f"${first + 2 * i}" for i in range(8)]
    if bits == 3:
        return (words[0], words[1], words[2], words[3]), (words[4], words[5], words[6], words[7])
    return (words[0], words[0], words[1], words[1]), (words[2], words[2], words[3], words[3])


def _level_2(bits: int) -> tl.constexpr:
    """Four tiles; code j in nibble j of the words of two bits, and its third bit in bit 2 j of the others."""
    cos, sin = _tables(8 + 2 * (bits - 1), bits)
    lines = ["prmt.b32 r0, $8, $9, 0x5140"]  # bytes of A and B in turn
    if bits == 3:
        lines += [
            "prmt.b32 r1, $10, $11, 0x4400",
            "and.b32 r1, r1, 0x00550055",
            "shl.b32 r2, r1, 4",
            "lop3.b32 r1, r1, r2, 0x05050505, 0xa8",
            "shl.b32 r2, r1, 2",
            "lop3.b32 r1, r1, r2, 0x11111111, 0xa8",  # a bit to each nibble of A, then of B
            "prmt.b32 r1, r1, 0, 0x3120",
            "shl.b32 r1, r1, 2",
            "lop3.b32 r0, r0, 0x33333333, r1, 0xea",
        ]
    else:
        lines += ["and.b32 r0, r0, 0x33333333"]
    lines += ["shr.u32 r3, r0, 16"]
    for selectors, tile in (("r0", 0), ("r3", 2)):
        lines += lookup.pairs(selectors, cos, (f"${tile}", f"${tile + 1}"))
        lines += lookup.pairs(selectors, sin, (f"${4 + tile}", f"${5 + tile}"))
    return lookup.text(*lines)


def _level_3() -> tl.constexpr:
    """Two tiles, codes in bits 0 and 8."""
    cos, sin = _tables(6, 2)
    lines = [
        "prmt.b32 r0, $4, $5, 0x5410",
        "shr.u32 r1, r0, 4",
        "lop3.b32 r0, r1, r0, 0x00f000f0, 0xe4",
        "and.b32 r0, r0, 0x00330033",
        "prmt.b32 r0, r0, 0, 0x4420",
    ]
    lines += lookup.pairs("r0", cos, ("$0", "$1")) + lookup.pairs("r0", sin, ("$2", "$3"))
    return lookup.text(*lines)


LEVEL_2, LEVEL_2_REGISTERS = _level_2(2), lookup.registers(8, 10)
LEVEL_2_OF_3, LEVEL_2_OF_3_REGISTERS = _level_2(3), lookup.registers(8, 20)
LEVEL_3, LEVEL_3_REGISTERS = _level_3(), lookup.registers(4, 10)


def fits(tree: PolarTree, books: tuple[AngleCodebook, ...]) -> bool:
    """Whether `column_tiles` can undo this tree: 4 bits, of angles that half a turn maps onto themselves, 2 or 3, 2."""
    bits = tuple(level.bits for level in tree.levels)
    if tree.head_dim != 128 or bits not in ((4, 3, 2, 2, 2, 2, 2), (4, 2, 2, 2, 2, 2, 2)):
        return False
    points = books[0].points
    return torch.allclose(points[8:], -points[:8], atol=1e-3)


def words(books: tuple[AngleCodebook, ...]) -> torch.Tensor:
    """`KernelSide.words` for `column_tiles`."""
    parts = [directions.tables(books[0].points)]
    for book, bits in ((books[1], len(books[1].points).bit_length() - 1), (books[2], 2)):
        parts += [lookup.byte_table(part, bits) for part in book.points.cpu().T]
    column = torch.arange(8, dtype=torch.int32)
    shifts = (
        16 * (column % 2) + 2 * (column // 4), 8 * (column % 4) + column // 4, 16 * (column % 2) + 2 * (column // 2),
        2 * column,
    )  # fmt: skip
    places = sum((shift << 8 * i for i, shift in enumerate(shifts)), torch.zeros_like(column))
    return torch.cat([*parts, places])


def coarse_table(books: tuple[AngleCodebook, ...]) -> torch.Tensor:
    """Radii of level 3, `[8, 256, 2]`, by column and codes of levels 4 to 7, the first in the lowest bits."""
    codes = torch.arange(256)
    column = torch.arange(8)[:, None]
    points = [book.points.cpu()[codes >> 2 * i & 3] for i, book in enumerate(books[3:])]
    radius = torch.ones(8, 256)
    for i, size in ((1, 4), (2, 2), (3, 1)):
        radius = radius * torch.where(column // size % 2 == 0, points[i][:, 0], points[i][:, 1])
    return radius[..., None] * points[0]


@triton.jit
def column_tiles(fields, p_coarse, words, o_row, o_t, m_t, META: tl.constexpr):
    """Eight tiles `[T, 16]` of unit vectors in code space; `META` as in `polarquant_recursive.py`."""
    b_places = words[len(words) - 1]
    T: tl.constexpr = o_t.shape[0]
    p_twos = fields[META[3][1]].to(tl.pointer_type(tl.int32), bitcast=True)
    b_rest = load_words(p_twos + META[4][3] // 2, o_row, o_t, m_t, META[4][2] // 2, 1, 1)
    b_column = b_places >> 24
    b_codes = (b_rest >> b_column) & 3 | (b_rest >> (14 + (b_column & 6))) & 12
    b_codes |= (b_rest >> (20 + (b_column & 2))) & 48 | (b_rest >> 22) & 192
    # A column's table first: it lies in the same place in every turn.
    p_column = p_coarse.to(tl.pointer_type(tl.int32), bitcast=True) + b_column * 128
    b_both = tl.load(p_column + b_codes)
    b_radii = (
        b_both.to(tl.int16).to(tl.float16, bitcast=True),
        (b_both >> 16).to(tl.int16).to(tl.float16, bitcast=True),
    )
    b_third = load_words(p_twos + META[3][3] // 2, o_row, o_t, m_t, META[3][2] // 2, 1, 1)
    FIRST: tl.constexpr = 8 + (8 if META[2][0] == 3 else 4)
    b_points = tl.inline_asm_elementwise(
        LEVEL_3, LEVEL_3_REGISTERS,
        [b_third >> (b_places >> 16 & 255), words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
        dtype=(tl.float16,) * 4, is_pure=True, pack=2,
    )  # fmt: skip
    b_radii = undone(b_radii, b_points)
    p_second = fields[META[2][1]].to(tl.pointer_type(tl.int32), bitcast=True)
    b_second = load_words(p_second + META[2][3] // 2, o_row, o_t, m_t, META[2][2] // 2, 2, 2)
    b_second = tl.reshape(tl.broadcast_to(b_second[:, None, :, None], [T, 2, 2, 2]), [T, 8])
    b_second = b_second >> (b_places & 255)
    if META[2][0] == 3:
        p_high = fields[META[2][1] + 1].to(tl.pointer_type(tl.int32), bitcast=True)
        b_high = load_words(p_high, o_row, o_t, m_t, 1, 1, 1) >> (b_places >> 8 & 255)
        b_points = tl.inline_asm_elementwise(
            LEVEL_2_OF_3, LEVEL_2_OF_3_REGISTERS,
            [b_second, b_high, words[8], words[9], words[10], words[11], words[12], words[13], words[14], words[15]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_points = tl.inline_asm_elementwise(
            LEVEL_2, LEVEL_2_REGISTERS, [b_second, words[8], words[9], words[10], words[11]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    b_radii = undone(b_radii, b_points)
    b_points = directions.unjoined(fields[META[1][1]], fields[0], words, o_row, o_t, m_t, 4, 8, 8)
    return lookup.joined(undone(b_radii, b_points))


@triton.jit
def undone(b_radii, b_points):
    """Tiles of the radii below: those times cos, then those times sin."""
    b_below = ()
    for i in tl.static_range(len(b_points)):
        b_below = b_below + (lookup.product(b_points[i], b_radii[i % len(b_radii)]),)
    return b_below
