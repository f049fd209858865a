"""Unpack words of angle codes to cos and sin with packed machine instructions, as `lookup.py` does for levels.

Tables hold eight angles, with inverted signs: half a turn of 4-bit codes, a quarter turn of 5-bit codes. The top bit of
a code adds half a turn, which negates cos and sin. In the second quarter, 5-bit angles (midpoints of their cells)
mirror those of the first: cos and sin swap, and cos changes its sign.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import assembly, lookup
from .codes import load_words


def _tables(first: int) -> tuple[tuple[str, str, str, str], tuple[str, str, str, str]]:
    """Registers of the tables of cos and of sin; Triton passes every constant twice (`pack=2`)."""
    cos_0, cos_1, cos_2, cos_3, sin_0, sin_1, sin_2, sin_3 = (f"${first + 2 * i}" for i in range(8))
    return (cos_0, cos_1, cos_2, cos_3), (sin_0, sin_1, sin_2, sin_3)


def _five_bits() -> tl.constexpr:
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
    return assembly.text(*lines)


FOUR_BITS = assembly.block(lookup.four_bits("$16", "$17", *_tables(18)), 16, 18)
FIVE_BITS = assembly.block(_five_bits(), 16, 22)


def fits(points: torch.Tensor, width: int) -> bool:
    """True if `directions` can unpack codes of `width` channels to these unit vectors `[angles, 2]`."""
    mirrored = torch.allclose(points[:8], points[:8].flip(0, 1), atol=1e-6)
    return lookup.fits(width, 1) and (len(points) == 16 or (len(points) == 32 and mirrored))


def tables(points: torch.Tensor) -> torch.Tensor:
    """Lookup tables that `directions` expects at the start of `words`: int32 `[8]`."""
    return torch.cat([assembly.byte_table(-part, 3) for part in points[:8].T.cpu()])


@triton.jit
def directions(
    p_low, p_high, words, o_row, o_t, m_t, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Tiles of cos, then tiles of sin, float16 in code order; the last of `words` are `assembly.places`."""
    b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, WORDS)
    if BITS == 4:
        b_both = assembly.assembled(FOUR_BITS, (b_words,) + words[:8], 16)
    else:
        b_high = assembly.load_bytes(p_high, o_row, o_t, m_t, WORDS, PADDED, WORDS)
        b_both = assembly.assembled(FIVE_BITS, (b_words, b_high, words[len(words) - 1]) + words[:8], 16)
    if PADDED < 16:
        b_both = assembly.joined(b_both)
    return b_both
