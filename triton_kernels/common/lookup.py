"""Unpack words of codes to float16 levels by tables of bytes: the fast path on NVIDIA GPUs.

Four-bit codes look up magnitudes, and their top bit is the sign: they count from zero outwards (`lloyd_max.outward`).
Uniform levels of four bits ascend and need no table: a code in the mantissa of 1024 is a number.

`levels` returns one tile per field j of a token's words (see `codes.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token

from .assembly import assembled, block, byte_table, joined, load_bytes, load_halves, pairs, places, text, transposed
from .codes import in_halves, load_columns, load_words


def _two_bits() -> tl.constexpr:
    lines = [
        "prmt.b32 r0, $8, 0, 0x3120",  # bytes of A and B alternate
        "and.b32 r1, r0, 0x33333333",  # even fields
        "shr.u32 r2, r0, 2",
        "and.b32 r2, r2, 0x33333333",  # odd fields
        "shr.u32 r3, r1, 16",
        "shr.u32 r4, r2, 16",
    ]
    table = ("$9", "$9", "$11", "$11")
    for selectors, field in (("r1", 0), ("r2", 1), ("r3", 4), ("r4", 5)):
        lines += pairs(selectors, table, (f"${field}", f"${field + 2}"))
    return text(*lines)


def _three_bits() -> tl.constexpr:
    """Unpack three-bit codes: the bit from the high plane moves to bit 2 of the nibble with the low bits."""
    lines = [
        "lop3.b32 r0, $11, $12, 0x0f0f, 0xe4",
        "prmt.b32 r0, $9, $10, r0",  # bytes A B A B of the high plane
        "shl.b32 r1, r0, 4",
        "lop3.b32 r1, r1, r0, 0x0000ffff, 0xe4",  # the bits of fields 2, 3 and 6, 7 at 6 and 7 of a byte
        "shr.u32 r2, r1, 2",  # those of fields 0, 1 and 4, 5 at 2 and 3
        "lop3.b32 r1, r2, r1, 0x0f0f0f0f, 0xe4",
        "prmt.b32 r2, $8, 0, 0x3120",  # bytes of A and B of the low plane alternate
        "and.b32 r3, r1, 0x44444444",
        "lop3.b32 r3, r2, 0x33333333, r3, 0xea",  # even fields
        "shr.u32 r1, r1, 1",
        "shr.u32 r2, r2, 2",
        "and.b32 r1, r1, 0x44444444",
        "lop3.b32 r4, r2, 0x33333333, r1, 0xea",  # odd fields
        "shr.u32 r5, r3, 16",
        "shr.u32 r6, r4, 16",
    ]
    for selectors, field in (("r3", 0), ("r4", 1), ("r5", 4), ("r6", 5)):
        lines += pairs(selectors, ("$13", "$15", "$17", "$19"), (f"${field}", f"${field + 2}"))
    return text(*lines)


def four_bits(a: str, b: str, *tables: tuple[str, str, str, str]) -> tl.constexpr:
    """Look up the four-bit codes of words A and B in tables of magnitudes, which follow each other in the outputs."""
    lines = []
    for half, order in ((0, "0x5140"), (1, "0x7362")):
        lines += [
            f"prmt.b32 r0, {a}, {b}, {order}",  # bytes of A and B alternate
            "and.b32 r3, r0, 0x77777777",  # magnitudes
            "shl.b32 r4, r0, 4",
            "shr.u32 r5, r3, 16",
        ]
        for part, selectors, signs in ((0, "r3", "0x5140"), (2, "r5", "0x7362")):
            lines += [f"prmt.b32 r6, r4, r0, {signs}"]
            for number, table in enumerate(tables):
                field = 8 * number + 4 * half + part
                lines += pairs(selectors, table, (f"${field}", f"${field + 1}"), "r6")
    return text(*lines)


def _four_even_bits() -> tl.constexpr:
    """Unpack uniform four-bit codes to 4 (code - 7.5), exactly.

    A code at bit 2 of the mantissa of 1024 makes 1024 + 4 code, less 1054; at bit 6, 1024 + 64 code, over 16, less 94.
    """
    lines = ["mov.b32 r4, 0xe41ee41e", "mov.b32 r5, 0x2c002c00", "mov.b32 r6, 0xd5e0d5e0"]
    for half, order in ((0, "0x5410"), (1, "0x7632")):
        lines += [f"prmt.b32 r0, $8, $9, {order}", "shl.b32 r1, r0, 2", "shr.u32 r2, r0, 6"]
        for part, register in ((0, "r1"), (2, "r2")):
            field = 4 * half + part
            lines += [
                f"lop3.b32 r3, {register}, 0x003c003c, 0x64006400, 0xea",
                f"add.rn.f16x2 ${field}, r3, r4",
                f"lop3.b32 r3, {register}, 0x03c003c0, 0x64006400, 0xea",
                f"fma.rn.f16x2 ${field + 1}, r3, r5, r6",
            ]
    return text(*lines)


TWO_BITS, THREE_BITS = block(_two_bits(), 8, 5), block(_three_bits(), 8, 13)
FOUR_BITS = block(four_bits("$8", "$9", ("$10", "$12", "$14", "$16")), 8, 10)
FOUR_EVEN_BITS = block(_four_even_bits(), 8, 2)


@triton.constexpr_function
def unit(bits):
    """Distance between neighbouring uniform levels, as `levels` returns them."""
    return 4 if bits == 4 else 1


def fits(width: int, bits: int, trellis: bool = False) -> bool:
    """True if `levels`, or `trellis_levels`, can unpack components of `width` channels and `bits` bits."""
    if trellis:
        return bits in (2, 3) and padded_words(width) >= 8 and words_per_token(width) % (2 * bits - 2) == 0
    aligned = bits == 4 or words_per_token(width) % 4 == 0 or places_needed(width, bits) == 0
    return bits <= 4 and padded_words(width) >= 8 and aligned


@triton.jit
def levels(
    p_low, p_high, words, o_row, o_t, m_t,
    FIRST: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, VALUES: tl.constexpr = False,
):  # fmt: skip
    """Tiles of float16 levels for codes of two to four bits; `words[FIRST:]` starts with their table from `byte_table`.

    Uniform levels are `unit · (code - half the largest)`; at four bits they need no table. The last of `words` is the
    tile of `places`, if needed. VALUES: the product sums over tokens.
    """
    COLUMNS: tl.constexpr = VALUES and PADDED >= 16 and PADDED == WORDS and (BITS == 2 or BITS == 4)
    if COLUMNS:
        b_words = load_columns(p_low, o_row, o_t, m_t, WORDS)
    elif BITS == 4:
        b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
    else:
        b_words = load_halves(p_low, words[len(words) - 1], o_row, o_t, m_t, WORDS, PADDED, COUNT)
    if BITS == 2:
        b_levels = assembled(TWO_BITS, (b_words,) + words[FIRST : FIRST + 2])
    elif BITS == 3:
        b_high = load_bytes(p_high, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = assembled(THREE_BITS, (b_words, b_high, words[len(words) - 1]) + words[FIRST : FIRST + 4])
    elif EVEN:
        b_levels = assembled(FOUR_EVEN_BITS, (b_words,))
    else:
        b_levels = assembled(FOUR_BITS, (b_words,) + words[FIRST : FIRST + 4])
    if COLUMNS:
        b_levels = transposed(b_levels)
    if PADDED < 16:
        b_levels = joined(b_levels)
    return b_levels


def even_tables(bits: int) -> list[torch.Tensor]:
    """Table that `levels` needs for uniform levels; an empty list if none."""
    codes = torch.arange(2**bits, device="cpu")
    return [byte_table(codes - (2**bits - 1) / 2, bits)] if bits in (2, 3) else []


def even_words(bits: int, width: int, device: torch.device) -> tuple[torch.Tensor | None, int]:
    """`KernelSide.words` and `places` for one component with uniform levels."""
    parts, count = even_tables(bits), places_needed(width, bits)
    if count:
        parts.append(places(count))
    return (torch.cat(parts).to(device) if parts else None), count


def places_needed(width: int, bits: int, trellis: bool = False) -> int:
    """Number of `places` that the words of a component of `width` channels and `bits` bits need."""
    words = padded_words(width)
    if trellis:
        halves = words // 2 if in_halves(bits, words, trellis) else words
        return halves if bits == 3 and halves < 16 else 0
    return words if bits in (1, 3) or (bits == 2 and words < 16) else 0
