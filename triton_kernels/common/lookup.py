"""Unpack words of codes to float16 levels by tables of bytes: the fast path on NVIDIA GPUs.

Four-bit codes look up magnitudes, and their top bit is the sign: they count from zero outwards (`lloyd_max.outward`).
Uniform levels of four bits ascend and need no table: a code in the mantissa of 1024 is a number.

`levels` and `trellis_levels` return one tile per field j of a token's words (see `codes.py`).
"""

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token

from .assembly import assembled, block, byte_table, joined, load_bytes, load_halves, pairs
from .codes import high_plane, load_columns, load_words, low_plane


def _two_bits() -> list[str]:
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
    return lines


def _three_bits() -> list[str]:
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
    return lines


def four_bits(a: str, b: str, *tables: tuple[str, str, str, str]) -> list[str]:
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
    return lines


def _four_even_bits() -> list[str]:
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
    return lines


def _trellis(bits: int) -> list[str]:
    """Unpack trellis codes of two or three bits, 16 to a word of 32; each word comes with the one before it.

    Nibbles of three bits index the levels: the parity of the stream of even bits with its delays of 1 and 6, the odd
    bit, and the parity of the delays of 2 and 4. Of three bits, the high plane has the sign; levels below zero count
    from the end.
    """
    lines = []
    for word, before, even, odd in (("$16", "$18", "r4", "r5"), ("$17", "$19", "r6", "r7")):
        for register, shift in (("r0", 2), ("r1", 12), ("r2", 4), ("r3", 8)):
            lines.append(f"shf.l.wrap.b32 {register}, {before}, {word}, {shift}")
        lines += [
            "lop3.b32 r0, r0, r1, 0x55555555, 0x28",
            f"xor.b32 r0, r0, {word}",  # the first parity of each number, and its odd bit
            "lop3.b32 r1, r2, r3, 0x55555555, 0x28",
            "shl.b32 r2, r1, 2",
            f"lop3.b32 {even}, r0, r2, 0x33333333, 0xe4",
            "shr.u32 r0, r0, 2",
            f"lop3.b32 {odd}, r0, r1, 0x33333333, 0xe4",
        ]
    for half, places, bytes_of_high in ((0, "0x5140", "0x2020"), (8, "0x7362", "0x3131")):
        if bits == 3:
            lines += [f"prmt.b32 r0, $20, 0, {bytes_of_high}", *_signs("r0", "r1", "r2", "r3")]
        for parity, words, sign in ((0, "r4, r6", "r1"), (1, "r5, r7", "r2")):
            lines += [f"prmt.b32 r0, {words}, {places}"]  # bytes of A and B alternate
            if bits == 2:
                lines += ["shr.u32 r3, r0, 16"]
                for selectors, first in (("r0", half + parity), ("r3", half + parity + 4)):
                    lines += pairs(selectors, ("$20", "$22", "$24", "$26"), (f"${first}", f"${first + 2}"))
            else:
                fields = (f"${half + parity + i}" for i in (0, 2, 4, 6))
                lines += _signed("r0", sign, ("$21", "$23", "$25", "$27"), tuple(fields))
    return lines


def _signs(high: str, even: str, odd: str, spare: str) -> list[str]:
    """Instructions that put the bits of bytes A B A B of the high plane at bits 3 and 7: of even and of odd fields."""
    return [
        f"shl.b32 {even}, {high}, 4",
        f"lop3.b32 {odd}, {even}, {high}, 0x0000ffff, 0xe4",  # those of fields 2, 3 and 6, 7 at 6 and 7 of a byte
        f"shl.b32 {even}, {odd}, 1",
        f"shr.u32 {spare}, {odd}, 1",
        f"lop3.b32 {even}, {spare}, {even}, 0x0f0f0f0f, 0xe4",
        f"shr.u32 {spare}, {odd}, 2",
        f"lop3.b32 {odd}, {spare}, {odd}, 0x0f0f0f0f, 0xe4",
    ]


def _signed(codes: str, sign: str, table: tuple[str, str, str, str], outputs: tuple[str, ...]) -> list[str]:
    """Instructions that look up eight codes of three bits, with signs at bit 3; those below zero count from the end."""
    lines = [
        f"lop3.b32 r8, {sign}, 0x88888888, 0, 0x0c",  # bit 3 of the negative
        "shr.u32 r9, r8, 3",
        "sub.u32 r8, r8, r9",
        f"xor.b32 {codes}, {codes}, r8",
        f"shl.b32 r8, {sign}, 4",
        f"shr.u32 r9, {codes}, 16",
    ]
    for selectors, first, signs in ((codes, 0, "0x5140"), ("r9", 2, "0x7362")):
        lines += [f"prmt.b32 r10, r8, {sign}, {signs}"]
        lines += pairs(selectors, table, (outputs[first], outputs[first + 1]), "r10")
    return lines


TWO_BITS, THREE_BITS = block(8, 5, *_two_bits()), block(8, 13, *_three_bits())
FOUR_BITS = block(8, 10, *four_bits("$8", "$9", ("$10", "$12", "$14", "$16")))
FOUR_EVEN_BITS = block(8, 2, *_four_even_bits())
TRELLIS_TWO, TRELLIS_THREE = block(16, 12, *_trellis(2)), block(16, 13, *_trellis(3))


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
    tile, words, CODES: tl.constexpr, FIRST: tl.constexpr, EVEN: tl.constexpr, VALUES: tl.constexpr = False,
    FOURS: tl.constexpr = False,
):  # fmt: skip
    """Tiles of float16 levels for codes of two to four bits; `words[FIRST:]` starts with their table from `byte_table`.

    Uniform levels are `unit · (code - half the largest)`; at four bits they need no table. The last of `words` is the
    tile of `places`, if needed. VALUES: the product sums over tokens. FOURS: as for `joined`.
    """
    BITS: tl.constexpr = CODES.bits
    WORDS: tl.constexpr = CODES.words
    PADDED: tl.constexpr = CODES.padded
    COUNT: tl.constexpr = CODES.count
    COLUMNS: tl.constexpr = VALUES and PADDED >= 16 and PADDED == WORDS and (BITS == 2 or BITS == 4)
    p_words = low_plane(tile, CODES)
    if COLUMNS:
        b_words = load_columns(p_words, tile, WORDS)
    elif BITS == 4:
        b_words = load_words(p_words, tile, WORDS, PADDED, COUNT)
    else:
        b_words = load_halves(p_words, words[len(words) - 1], tile, WORDS, PADDED, COUNT)
    if BITS == 2:
        b_levels = assembled(TWO_BITS, (b_words,) + words[FIRST : FIRST + 2])
    elif BITS == 3:
        b_high = load_bytes(high_plane(tile, CODES), tile, WORDS, PADDED, COUNT)
        b_levels = assembled(THREE_BITS, (b_words, b_high, words[len(words) - 1]) + words[FIRST : FIRST + 4])
    elif EVEN:
        b_levels = assembled(FOUR_EVEN_BITS, (b_words,))
    else:
        b_levels = assembled(FOUR_BITS, (b_words,) + words[FIRST : FIRST + 4])
    if COLUMNS:
        b_levels = [tl.trans(b_tile) for b_tile in b_levels]
    if PADDED < 16:
        b_levels = joined(b_levels, FOURS)
    return b_levels


@triton.jit
def load_twos(tile, CODES: tl.constexpr):
    """Load the words of a two-bit plane as words of 32 bits, and those before them in a circle: `[T, PADDED / 2]`."""
    TWOS: tl.constexpr = CODES.words // 2
    SHAPE: tl.constexpr = [tile.o_t.shape[0], CODES.padded // 2]
    p_twos = low_plane(tile, CODES).to(tl.pointer_type(tl.int32), bitcast=True) + tile.o_row * TWOS
    o_c = tl.arange(0, CODES.padded // 2)
    m_w = tl.broadcast_to(tile.m_t[:, None], SHAPE)
    if CODES.padded != CODES.words:
        m_w = m_w & (o_c < TWOS)[None, :]
    b_twos = tl.load(p_twos + (tile.o_t[:, None] * TWOS + o_c[None, :]), mask=m_w, other=0)
    # In one dimension, since in the layout of the first load the second would touch each sector four times.
    o_w = tl.arange(0, SHAPE[0] * SHAPE[1])
    o_c = o_w % SHAPE[1]
    o_before = o_w // SHAPE[1] * TWOS + tl.where(o_c == 0, TWOS - 1, o_c - 1)
    b_before = tl.load(p_twos + o_before, mask=tl.ravel(m_w), other=0)
    return b_twos, tl.reshape(b_before, SHAPE)


@triton.jit
def trellis_levels(tile, CODES: tl.constexpr, FIRST: tl.constexpr, FOURS: tl.constexpr):
    """Tiles of float16 levels for trellis codes of two or three bits; see `levels`."""
    WORDS: tl.constexpr = CODES.words
    PADDED: tl.constexpr = CODES.padded
    words = tile.words
    b_table = words[FIRST : FIRST + 4]
    b_twos, b_before = load_twos(tile, CODES)
    if CODES.bits == 2:
        b_halves = assembled(TRELLIS_TWO, (b_twos, b_before) + b_table, 16)
    else:
        p_halves = high_plane(tile, CODES).to(tl.pointer_type(tl.int16), bitcast=True)
        b_high = load_halves(p_halves, words[len(words) - 1], tile, WORDS // 2, PADDED // 2, WORDS // 2)
        b_halves = assembled(TRELLIS_THREE, (b_twos, b_before, b_high) + b_table, 16)
    b_levels = ()
    for i in tl.static_range(8):
        b_levels = b_levels + joined((b_halves[i], b_halves[i + 8]), FOURS)
    if PADDED < 16:
        b_levels = joined(b_levels, FOURS)
    return b_levels


def even_table(bits: int) -> torch.Tensor:
    """Table that `levels` needs for uniform levels, int32; empty if it needs none."""
    if bits not in (2, 3):
        return torch.empty(0, dtype=torch.int32, device="cpu")
    return byte_table(torch.arange(2**bits, device="cpu") - (2**bits - 1) / 2, bits)


def trellis_table(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """`byte_table` of the levels of trellis codes, with bits 1 and 2 of their index exchanged."""
    index = torch.arange(len(levels), device=levels.device)
    return byte_table(levels[index & ~6 | (index & 2) << 1 | (index & 4) >> 1], bits + 1)


def places_needed(width: int, bits: int, trellis: bool = False) -> int:
    """Number of `places` that the words of a component of `width` channels and `bits` bits need."""
    words = padded_words(width)
    if trellis:
        return words // 2 if bits == 3 and words < 32 else 0
    return words if bits in (1, 3) or (bits == 2 and words < 16) else 0
