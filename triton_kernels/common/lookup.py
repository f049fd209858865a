"""Unpack words of codes to half-precision levels with packed machine instructions: the fast path on NVIDIA GPUs.

`prmt.b32` looks up four bytes at once in a table of eight, with packed nibbles as selectors. A level takes two lookups,
one per byte; another `prmt` interleaves four low and four high bytes into two pairs of levels, half2. The assembly
takes any two words A and B of a thread and returns pairs (A_j, B_j) of their fields j. Four-bit codes look up
magnitudes and take their sign from the top bit: they count from zero outwards (`lloyd_max.outward`). Even levels of
four bits ascend and need no table: a code in the mantissa of 1024 is a number.

`levels` returns one tile per field j of a token's words (see `codes.py`).
`tests/triton_kernels/common/test_lookup.py` runs the assembly without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token

from .codes import in_halves, load_columns, load_words, tile_width

UNIT = tl.constexpr(2.0**-24)
"""Value of the lowest bit of a float16 number, the smallest above zero."""
HEADROOM = 2.0**8
"""Largest mapped query where codes stay in place: queries of different fields differ by up to 256."""


def text(*lines: str) -> tl.constexpr:
    """Block of assembly with its own registers r0 to r15."""
    return tl.constexpr("{\n.reg .b32 r<16>;\n" + "\n".join(f"{line};" for line in lines) + "\n}")


def registers(outputs: int, inputs: int) -> tl.constexpr:
    """Register constraints of a block of assembly."""
    return tl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


def pairs(selectors: str, table: tuple[str, str, str, str], outputs: tuple[str, str], signs: str = "") -> list[str]:
    """Instructions that look up codes [A_i, A_j, B_i, B_j], the low 16 bits of `selectors`, as two pairs of levels.

    outputs: registers of the pairs (A_i, B_i) and (A_j, B_j).

    table: low bytes of the first four levels, low bytes of the others, then their high bytes likewise.
    signs: a register with the sign bits of the four levels, inverted, where the table holds magnitudes.
    """
    low, low_rest, high, high_rest = table
    return [
        f"prmt.b32 r14, {low}, {low_rest}, {selectors}",
        f"prmt.b32 r15, {high}, {high_rest}, {selectors}",
        *([f"lop3.b32 r15, r15, {signs}, 0x80808080, 0xd2"] if signs else []),
        f"prmt.b32 {outputs[0]}, r14, r15, 0x6240",
        f"prmt.b32 {outputs[1]}, r14, r15, 0x7351",
    ]


def _one_bit() -> tl.constexpr:
    """Unpack one-bit codes: the inverted bit becomes the sign of one half."""
    lines = [
        "lop3.b32 r0, $10, $11, 0x0f0f, 0xe4",
        "prmt.b32 r0, $8, $9, r0",  # bytes A B A B
        "prmt.b32 r0, r0, 0, 0x1100",
    ]
    for j in range(8):
        lines += [f"shl.b32 r1, r0, {7 - j}", f"lop3.b32 ${j}, r1, 0x80008000, 0xb800b800, 0x6a"]
    return text(*lines)


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


def _trellis(bits: int) -> tl.constexpr:
    """Unpack trellis codes of two or three bits, whose words lie above the words before them (see `load_pairs`).

    Nibbles of three bits index the levels: the parities of the stream of even bits, and the odd bits. Of three bits,
    the high plane has the sign, and levels below zero count from the end.
    """
    lines = []
    for word, register in (("$8", "r0"), ("$9", "r4")):
        lines += [f"and.b32 {register}, {word}, 0x55555555"]
        for first, second in ((2, 12), (5, 9)):
            lines += [f"shl.b32 r{1 + i}, {register}, {delay}" for i, delay in enumerate((first, second))]
            if first == 2:
                lines += [f"lop3.b32 r3, {register}, r1, r2, 0x96"]
            else:
                lines += [f"lop3.b32 {register}, r3, r1, r2, 0x96"]
    lines += [
        "prmt.b32 r0, r0, r4, 0x7362",  # bytes of A and B alternate
        "prmt.b32 r1, $8, $9, 0x7362",
        "shl.b32 r2, r1, 1",
        "and.b32 r2, r2, 0x44444444",
        "lop3.b32 r2, r0, 0x33333333, r2, 0xea",  # even fields
        "shr.u32 r3, r0, 2",
        "shr.u32 r4, r1, 1",
        "and.b32 r4, r4, 0x44444444",
        "lop3.b32 r3, r3, 0x33333333, r4, 0xea",  # odd fields
    ]
    if bits == 2:
        lines += ["shr.u32 r5, r2, 16", "shr.u32 r6, r3, 16"]
        table = ("$10", "$12", "$14", "$16")
        for selectors, field in (("r2", 0), ("r3", 1), ("r5", 4), ("r6", 5)):
            lines += pairs(selectors, table, (f"${field}", f"${field + 2}"))
        return text(*lines)
    lines += [
        "lop3.b32 r0, $12, $13, 0x0f0f, 0xe4",
        "prmt.b32 r0, $10, $11, r0",  # bytes A B A B of the high plane
        *_signs("r0", "r4", "r1", "r5"),
    ]
    for codes, sign, field in (("r2", "r4", 0), ("r3", "r1", 1)):
        fields = (f"${field + i}" for i in (0, 2, 4, 6))
        lines += _signed(codes, sign, ("$14", "$16", "$18", "$20"), tuple(fields))
    return text(*lines)


def _trellis_words(bits: int) -> tl.constexpr:
    """Unpack trellis codes of two or three bits, 16 to a word of 32; each word comes with the one before it.

    Nibbles of three bits index the levels: the parity of the stream of even bits with its delays of 1 and 6, the odd
    bit, and the parity of the delays of 2 and 4. Of three bits, the high plane has the sign as in `_trellis`.
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
    return text(*lines)


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


def _two_even_bits() -> tl.constexpr:
    """Unpack two-bit codes to numbers, exactly: in the mantissa of 1024, of which a power of two, less its share."""
    lines = ["shr.u32 r0, $8, 10", "mov.b32 r1, 0xe400e400"]
    for field in range(8):
        place = 2 * (field % 5)
        lines += [f"lop3.b32 r2, {'r0' if field > 4 else '$8'}, {0x30003 << place:#x}, 0x64006400, 0xea"]
        if place:
            factor, share = (15 - place << 10) * 0x10001, (0x8000 | 25 - place << 10) * 0x10001
            lines += [f"mov.b32 r3, {factor:#x}", f"mov.b32 r4, {share:#x}", f"fma.rn.f16x2 ${field}, r2, r3, r4"]
        else:
            lines += [f"add.rn.f16x2 ${field}, r2, r1"]
    return text(*lines)


def _four_bits() -> tl.constexpr:
    lines = []
    for half, places in ((0, "0x5140"), (1, "0x7362")):
        lines += [
            f"prmt.b32 r0, $8, $9, {places}",  # bytes of A and B alternate
            "and.b32 r3, r0, 0x77777777",  # magnitudes
            "shl.b32 r4, r0, 4",
            "shr.u32 r5, r3, 16",
        ]
        for part, selectors, signs in ((0, "r3", "0x5140"), (2, "r5", "0x7362")):
            lines += [f"prmt.b32 r6, r4, r0, {signs}"]
            field = 4 * half + part
            lines += pairs(selectors, ("$10", "$12", "$14", "$16"), (f"${field}", f"${field + 1}"), "r6")
    return text(*lines)


def _four_even_bits() -> tl.constexpr:
    """Unpack even four-bit codes to 4 (code - 7.5), exactly.

    The code lies at bit 2 of the mantissa of 1024, less 1054, or at bit 6, of which a sixteenth less 94.
    """
    lines = ["mov.b32 r4, 0xe41ee41e", "mov.b32 r5, 0x2c002c00", "mov.b32 r6, 0xd5e0d5e0"]
    for half, places in ((0, "0x5410"), (1, "0x7632")):
        lines += [f"prmt.b32 r0, $8, $9, {places}", "shl.b32 r1, r0, 2", "shr.u32 r2, r0, 6"]
        for part, register in ((0, "r1"), (2, "r2")):
            field = 4 * half + part
            lines += [
                f"lop3.b32 r3, {register}, 0x003c003c, 0x64006400, 0xea",
                f"add.rn.f16x2 ${field}, r3, r4",
                f"lop3.b32 r3, {register}, 0x03c003c0, 0x64006400, 0xea",
                f"fma.rn.f16x2 ${field + 1}, r3, r5, r6",
            ]
    return text(*lines)


@triton.constexpr_function
def place(field, bits):
    """Bit of a float16 number's mantissa, which has ten, at which `placed` leaves the code of a field."""
    return bits * (field % (10 // bits))


def _placed(bits: int) -> tl.constexpr:
    """Mask codes where they lie: half-precision numbers below the normal ones, `code · 2^(place - 24)`."""
    lines, fields = [], list(range(8))
    if bits == 1:
        lines = [
            "lop3.b32 r0, $10, $11, 0x0f0f, 0xe4",
            "prmt.b32 r0, $8, $9, r0",  # bytes A B A B
            "prmt.b32 r0, r0, 0, 0x1100",
        ]
        runs = {"r0": fields}
    elif bits == 2:
        lines = ["shr.u32 r0, $8, 10"]
        runs = {"$8": fields[:5], "r0": fields[5:]}
    else:
        lines = [
            "prmt.b32 r0, $8, $9, 0x5410",  # halves of A and B
            "prmt.b32 r1, $8, $9, 0x7632",
            "shr.u32 r2, r0, 8",
            "shr.u32 r3, r1, 8",
        ]
        runs = {"r0": fields[:2], "r2": fields[2:4], "r1": fields[4:6], "r3": fields[6:]}
    for register, run in runs.items():
        for field in run:
            mask = (2**bits - 1) * 0x10001 << bits * (field % (10 // bits))
            lines.append(f"and.b32 ${field}, {register}, {mask:#x}")
    return text(*lines)


HALF = text("prmt.b32 r0, $3, $4, 0x0072", "prmt.b32 $0, $1, $2, r0")
HALF_REGISTERS = registers(1, 4)
ONE_BIT, ONE_BIT_REGISTERS = _one_bit(), registers(8, 4)
TWO_BITS, TWO_BITS_REGISTERS = _two_bits(), registers(8, 5)
TWO_EVEN_BITS, TWO_EVEN_BITS_REGISTERS = _two_even_bits(), registers(8, 1)
THREE_BITS, THREE_BITS_REGISTERS = _three_bits(), registers(8, 13)
TRELLIS_TWO, TRELLIS_TWO_REGISTERS = _trellis(2), registers(8, 10)
TWO_WORDS, TWO_WORDS_REGISTERS = _trellis_words(2), registers(16, 12)
THREE_WORDS, THREE_WORDS_REGISTERS = _trellis_words(3), registers(16, 13)
TRELLIS_THREE, TRELLIS_THREE_REGISTERS = _trellis(3), registers(8, 14)
FOUR_BITS, FOUR_BITS_REGISTERS = _four_bits(), registers(8, 10)
FOUR_EVEN_BITS, FOUR_EVEN_BITS_REGISTERS = _four_even_bits(), registers(8, 2)

PLACED_ONE, PLACED_TWO, PLACED_FOUR = _placed(1), _placed(2), _placed(4)
PLACED_TWO_REGISTERS = registers(8, 1)


@triton.constexpr_function
def unit(bits):
    """Distance between neighbouring even levels, as `levels` returns them."""
    return 4 if bits == 4 else 1


def fits(width: int, bits: int, trellis: bool = False) -> bool:
    """True if `levels`, or `trellis_levels`, can unpack components of `width` channels and `bits` bits."""
    if trellis:
        return bits in (2, 3) and padded_words(width) >= 8 and words_per_token(width) % (2 * bits - 2) == 0
    aligned = bits == 4 or words_per_token(width) % 4 == 0 or places_needed(width, bits) == 0
    return bits <= 4 and padded_words(width) >= 8 and aligned


@triton.jit
def load_bytes(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load the words of a one-bit plane, int32 `[T, PADDED]`: column c holds four neighbours, its own in byte `c % 4`.

    Loaded as bytes they would make the tensor cores' operands four tokens deep and move every other operand.
    """
    p_fours = p_words.to(tl.pointer_type(tl.int32), bitcast=True)
    b_fours = load_words(p_fours, o_row, o_t, m_t, WORDS // 4, PADDED // 4, COUNT // 4)
    b_fours = tl.broadcast_to(b_fours[:, :, None], [o_t.shape[0], PADDED // 4, 4])
    return tl.reshape(b_fours, [o_t.shape[0], PADDED])


@triton.jit
def load_halves(p_words, b_places, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load the words of a two-bit plane, int16 `[T, PADDED]`, as 32-bit words.

    With few words per token the compiler would load them one by one, and move every level instead of the words.
    """
    if PADDED >= 16:
        b_words = load_words(p_words, o_row, o_t, m_t, WORDS, PADDED, COUNT)
    else:
        p_twos = p_words.to(tl.pointer_type(tl.int32), bitcast=True)
        b_twos = load_words(p_twos, o_row, o_t, m_t, WORDS // 2, PADDED // 2, COUNT // 2)
        b_twos = tl.broadcast_to(b_twos[:, :, None], [o_t.shape[0], PADDED // 2, 2])
        b_words = tl.inline_asm_elementwise(
            HALF, HALF_REGISTERS, [tl.reshape(b_twos, [o_t.shape[0], PADDED]), b_places],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return b_words


@triton.jit
def load_twos(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the words of a two-bit plane as words of 32 bits, and those before them in a circle: `[T, PADDED / 2]`."""
    p_twos = p_words.to(tl.pointer_type(tl.int32), bitcast=True) + o_row * (WORDS // 2) + o_t[:, None] * (WORDS // 2)
    o_c = tl.arange(0, PADDED // 2)
    o_before = tl.where(o_c == 0, WORDS // 2 - 1, o_c - 1)
    m_w = m_t[:, None]
    if PADDED != WORDS:
        m_w = m_w & (o_c < WORDS // 2)[None, :]
    b_twos = tl.load(p_twos + o_c[None, :], mask=m_w, other=0)
    return b_twos, tl.load(p_twos + o_before[None, :], mask=m_w, other=0)


@triton.jit
def load_pairs(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the words of a two-bit plane, int32 `[T, PADDED]`, each above the one before it, in a circle.

    Of a 32-bit word's two, the upper has the lower before it already.
    """
    b_twos, b_before = load_twos(p_words, o_row, o_t, m_t, WORDS, PADDED)
    b_first = (b_twos << 16) | ((b_before >> 16) & 0xFFFF)
    return tl.reshape(tl.join(b_first, b_twos), [o_t.shape[0], PADDED])


@triton.jit
def trellis_levels(
    p_low, p_high, words, o_row, o_t, m_t,
    FIRST: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Tiles of float16 levels of trellis codes of two or three bits; see `levels`."""
    if in_halves(BITS, PADDED, True):
        b_words, b_before = load_twos(p_low, o_row, o_t, m_t, WORDS, PADDED)
        if BITS == 2:
            b_halves = tl.inline_asm_elementwise(
                TWO_WORDS, TWO_WORDS_REGISTERS,
                [b_words, b_before, words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
                dtype=(tl.float16,) * 16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            p_halves = p_high.to(tl.pointer_type(tl.int16), bitcast=True)
            b_high = load_halves(p_halves, words[len(words) - 1], o_row, o_t, m_t, WORDS // 2, PADDED // 2, WORDS // 2)
            b_halves = tl.inline_asm_elementwise(
                THREE_WORDS, THREE_WORDS_REGISTERS,
                [b_words, b_before, b_high, words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
                dtype=(tl.float16,) * 16, is_pure=True, pack=2,
            )  # fmt: skip
        b_levels = ()
        for i in tl.static_range(8):
            b_levels = b_levels + joined((b_halves[i], b_halves[i + 8]))
    elif BITS == 2:
        b_words = load_pairs(p_low, o_row, o_t, m_t, WORDS, PADDED)
        b_levels = tl.inline_asm_elementwise(
            TRELLIS_TWO, TRELLIS_TWO_REGISTERS,
            [b_words, words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_words = load_pairs(p_low, o_row, o_t, m_t, WORDS, PADDED)
        b_high = load_bytes(p_high, o_row, o_t, m_t, WORDS, PADDED, WORDS)
        b_levels = tl.inline_asm_elementwise(
            TRELLIS_THREE, TRELLIS_THREE_REGISTERS,
            [b_words, b_high, words[len(words) - 1],
             words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    if PADDED < 16:
        b_levels = joined(b_levels)
    return b_levels


@triton.jit
def levels(
    p_low, p_high, words, o_row, o_t, m_t,
    FIRST: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr, VALUES: tl.constexpr = False,
):  # fmt: skip
    """Tiles of float16 levels; `words` holds the table of uneven levels from `FIRST` on, in the format of `byte_table`.

    Even levels are the codes less half the largest, times `unit`. The last of `words` is the tile of `places`, if
    needed. VALUES: tokens will be the depth of the product.
    """
    COLUMNS: tl.constexpr = VALUES and PADDED >= 16 and PADDED == WORDS and (BITS == 2 or BITS == 4)
    if BITS == 1:
        b_words = load_bytes(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            ONE_BIT, ONE_BIT_REGISTERS, [b_words, words[len(words) - 1]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 2:
        if COLUMNS:
            b_words = load_columns(p_low, o_row, o_t, m_t, WORDS)
        else:
            b_words = load_halves(p_low, words[len(words) - 1], o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            TWO_BITS, TWO_BITS_REGISTERS, [b_words, words[FIRST], words[FIRST + 1]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 3:
        b_words = load_halves(p_low, words[len(words) - 1], o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_high = load_bytes(p_high, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            THREE_BITS, THREE_BITS_REGISTERS,
            [b_words, b_high, words[len(words) - 1],
             words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        if COLUMNS:
            b_words = load_columns(p_low, o_row, o_t, m_t, WORDS)
        else:
            b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        if EVEN:
            b_levels = tl.inline_asm_elementwise(
                FOUR_EVEN_BITS, FOUR_EVEN_BITS_REGISTERS, [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
            )
        else:
            b_levels = tl.inline_asm_elementwise(
                FOUR_BITS, FOUR_BITS_REGISTERS,
                [b_words, words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
                dtype=(tl.float16,) * 8, is_pure=True, pack=2,
            )  # fmt: skip
    if COLUMNS:
        b_levels = turned(b_levels)
    if PADDED < 16:
        b_levels = joined(b_levels)
    return b_levels


@triton.jit
def placed(
    p_low, words, o_row, o_t, m_t,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Tiles of codes of one, two or four bits as numbers in place, `code · 2^(place - 24)`; see `levels`.

    It takes one instruction per two codes, and one or less to put the next fields in place.
    """
    COLUMNS: tl.constexpr = VALUES and PADDED >= 16 and PADDED == WORDS and BITS > 1
    if BITS == 1:
        b_words = load_bytes(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
    elif COLUMNS:
        b_words = load_columns(p_low, o_row, o_t, m_t, WORDS)
    elif BITS == 2 and PADDED < 16:
        b_words = load_halves(p_low, words[len(words) - 1], o_row, o_t, m_t, WORDS, PADDED, COUNT)
    else:
        b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
    if BITS == 1:
        b_codes = tl.inline_asm_elementwise(
            PLACED_ONE, ONE_BIT_REGISTERS, [b_words, words[len(words) - 1]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 2:
        b_codes = tl.inline_asm_elementwise(
            PLACED_TWO, PLACED_TWO_REGISTERS, [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        b_codes = tl.inline_asm_elementwise(
            PLACED_FOUR, FOUR_EVEN_BITS_REGISTERS, [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    if COLUMNS:
        b_codes = turned(b_codes)
    if PADDED < 16:
        b_codes = joined(b_codes)
    return b_codes


@triton.jit
def placed_codes(b_codes, PADDED: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Tiles of `placed` from the codes that `load_codes` returns, as multiples of `UNIT`: the portable path."""
    WIDTH: tl.constexpr = tile_width(PADDED)
    b_tiles = ()
    for i in tl.static_range(len(b_codes)):
        o_field = i * (WIDTH // PADDED) + tl.arange(0, WIDTH) // PADDED
        b_tiles = b_tiles + ((b_codes[i] << (BITS * (o_field % (10 // BITS)))[None, :]).to(DTYPE),)
    return b_tiles


@triton.jit
def middle_tile(TOKENS: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Tile of constants that is multiplied with what `in_place` adds for the middle code."""
    return tl.full([TOKENS, 16], 2.0**BITS * (UNIT if FAST else 1.0), DTYPE)


def in_place(rows: torch.Tensor, bits: int, keys: bool) -> torch.Tensor:
    """Rows of a map `[H, W, D]` for codes in place, and 16 more for the middle code: `[H, W + 16, D]`.

    Rows are of levels a distance of 1 apart, in the order of codes. The middle of queries is divided into shares of
    different lengths, so that they are not all rounded alike.
    """
    fields = torch.arange(8, device=rows.device).repeat_interleave(rows.shape[1] // 8)
    places = torch.tensor([place(field, bits) for field in range(8)], device=rows.device)[fields]
    shares = torch.arange(1.0, 17.0, device=rows.device) / 136 if keys else torch.eye(16, device=rows.device)[0]
    middle = -(2**bits - 1) / 2 * 2.0**-bits * rows.sum(1, keepdim=True) * shares[:, None]
    return torch.cat([rows * 2.0 ** -places[:, None], middle], 1)


@triton.jit
def two_bit_codes(p_low, words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Tiles of two-bit codes as float16 numbers, without a table: one integer instruction per two codes."""
    if PADDED < 16:
        b_words = load_halves(p_low, words[len(words) - 1], o_row, o_t, m_t, WORDS, PADDED, WORDS)
    elif WORDS % 2:
        b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, WORDS)
    else:
        # As words of 16 bits the compiler would load values into registers, and wait for them in every turn.
        p_twos = p_low.to(tl.pointer_type(tl.int32), bitcast=True)
        b_twos = load_words(p_twos, o_row, o_t, m_t, WORDS // 2, PADDED // 2, WORDS // 2)
        b_words = tl.reshape(tl.join(b_twos.to(tl.int16), (b_twos >> 16).to(tl.int16)), [o_t.shape[0], PADDED])
    b_codes = tl.inline_asm_elementwise(
        TWO_EVEN_BITS, TWO_EVEN_BITS_REGISTERS, [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
    )
    if PADDED < 16:
        b_codes = joined(b_codes)
    return b_codes


@triton.jit
def turned(b_tiles):
    """Transpose each tile."""
    b_turned = ()
    for i in tl.static_range(len(b_tiles)):
        b_turned = b_turned + (tl.trans(b_tiles[i]),)
    return b_turned


@triton.jit
def joined(b_tiles):
    """Join pairs of tiles narrower than `tile_width` side by side, without moving numbers between threads."""
    b_pairs = ()
    for i in tl.static_range(len(b_tiles) // 2):
        b_pair = tl.permute(tl.join(b_tiles[2 * i], b_tiles[2 * i + 1]), [0, 2, 1])
        b_pairs = b_pairs + (tl.reshape(b_pair, [b_pair.shape[0], 2 * b_pair.shape[2]]),)
    return b_pairs


@triton.jit
def scaled(b_levels, b_scale, b_zero):
    """`levels * scale + zero` in float16, two at a time; scale and zero broadcast to the levels' shape."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [b_levels, b_scale, b_zero],
        dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def product(b_x, b_y):
    """`x * y` in float16, two at a time; y broadcasts to the shape of x."""
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [b_x, b_y], dtype=tl.float16, is_pure=True, pack=2
    )  # fmt: skip


def warps(width: int) -> int:
    """Warps that it takes to hold the sums of `width` channels in registers."""
    return max(1, padded_words(width) // 16)


def even_tables(bits: int) -> list[torch.Tensor]:
    """Table that `levels` needs for even codes; an empty list if none."""
    return [byte_table((torch.arange(2**bits) - (2**bits - 1) / 2) * unit(bits), bits)] if bits in (2, 3) else []


def even_words(bits: int, width: int, device: torch.device) -> tuple[torch.Tensor | None, int]:
    """`KernelSide.words` and `places` for one component of even codes; those of two bits need no table."""
    parts, count = even_tables(bits) if bits == 3 else [], places_needed(width, bits)
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


def places(words: int) -> torch.Tensor:
    """`prmt` selectors of narrow words within 32-bit words, int32 `[words]`.

    The low half selects bytes A B A B: nibbles 0 and 2 are taken from A's entry, 1 and 3 from B's. The high half
    selects halves A B: the low byte from A's entry, the high byte from B's.
    """
    byte = torch.arange(words, dtype=torch.int32) % 4
    half = 0x5410 + 0x2222 * (byte % 2)
    return byte | (4 + byte) << 4 | byte << 8 | (4 + byte) << 12 | half << 16


def trellis_table(levels: torch.Tensor, bits: int, padded: int) -> torch.Tensor:
    """`byte_table` of the levels of trellis codes; where their words are read by 32 bits, bits 1 and 2 swap places."""
    if in_halves(bits, padded, True):
        index = torch.arange(len(levels))
        levels = levels[index & ~6 | (index & 2) << 1 | (index & 4) >> 1]
    return byte_table(levels, bits + 1)


def byte_table(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """`prmt` tables of levels by code, int32: low bytes, then high bytes; for four bits of the levels above zero."""
    halves = levels[len(levels) // 2 :].half() if bits == 4 else levels.half()
    return halves.view(torch.uint8).view(-1, 2).T.contiguous().view(torch.int32).flatten()
