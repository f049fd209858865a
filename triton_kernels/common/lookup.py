"""Words of codes to half-precision levels in packed machine instructions: the fast path on NVIDIA GPUs.

`prmt.b32` looks four bytes up at once in a table of eight, its selectors being packed nibbles. A level takes two
lookups, one for each of its bytes; `prmt` then interleaves four low and four high bytes to two pairs of levels, half2.
The text works on any two words A and B that a thread holds and gives pairs (A_j, B_j) of their fields j. Four bits look
up magnitudes, and take their sign from the top bit: such codes count from zero outwards (`lloyd_max.outward`). Even
levels of four bits ascend and need no table: a code in the mantissa of 1024 is a number.

`levels` gives tiles of fields j of the words of a token (see `codes.py`).
`tests/triton_kernels/test_lookup.py` runs the text without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token

from .codes import load_words


def text(*lines: str) -> tl.constexpr:
    """Assembly with registers r0 to r15 of its own."""
    return tl.constexpr("{\n.reg .b32 r<16>;\n" + "\n".join(f"{line};" for line in lines) + "\n}")


def registers(outputs: int, inputs: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=&r"] * outputs + ["r"] * inputs))


def pairs(selectors: str, table: tuple[str, str, str, str], outputs: tuple[str, str], signs: str = "") -> list[str]:
    """Levels of codes [A_i, A_j, B_i, B_j], the low 16 bits of `selectors`: pairs (A_i, B_i) and (A_j, B_j).

    table: low bytes of the first four levels, low bytes of the others, and their high bytes.
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
    """The inverted bit becomes the sign of one half."""
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
        "prmt.b32 r0, $8, 0, 0x3120",  # bytes of A and B in turn
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
    """The bit of a code's high plane moves to bit 2 of the nibble that has the low ones."""
    lines = [
        "lop3.b32 r0, $11, $12, 0x0f0f, 0xe4",
        "prmt.b32 r0, $9, $10, r0",  # bytes A B A B of the high plane
        "shl.b32 r1, r0, 4",
        "lop3.b32 r1, r1, r0, 0x0000ffff, 0xe4",  # the bits of fields 2, 3 and 6, 7 at 6 and 7 of a byte
        "shr.u32 r2, r1, 2",  # those of fields 0, 1 and 4, 5 at 2 and 3
        "lop3.b32 r1, r2, r1, 0x0f0f0f0f, 0xe4",
        "prmt.b32 r2, $8, 0, 0x3120",  # bytes of A and B in turn of the low plane
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


def _four_bits() -> tl.constexpr:
    lines = []
    for half, places in ((0, "0x5140"), (1, "0x7362")):
        lines += [
            f"prmt.b32 r0, $8, $9, {places}",  # bytes of A and B in turn
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
    """4 (code - 7.5): codes at bits 2 or 6 of the mantissa of 1024, less 1054, or a sixteenth less 94; all exact."""
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


HALF = text("prmt.b32 r0, $3, $4, 0x0072", "prmt.b32 $0, $1, $2, r0")
HALF_REGISTERS = registers(1, 4)
ONE_BIT, ONE_BIT_REGISTERS = _one_bit(), registers(8, 4)
TWO_BITS, TWO_BITS_REGISTERS = _two_bits(), registers(8, 5)
THREE_BITS, THREE_BITS_REGISTERS = _three_bits(), registers(8, 13)
FOUR_BITS, FOUR_BITS_REGISTERS = _four_bits(), registers(8, 10)
FOUR_EVEN_BITS, FOUR_EVEN_BITS_REGISTERS = _four_even_bits(), registers(8, 2)


@triton.constexpr_function
def unit(bits):
    """The difference between neighbouring levels that are even, as `levels` gives them."""
    return 4 if bits == 4 else 1


def fits(width: int, bits: int) -> bool:
    """Whether `levels` can unpack components of so many channels and bits."""
    whole = bits == 4 or words_per_token(width) % 4 == 0 or places_needed(width, bits) == 0
    return bits <= 4 and padded_words(width) >= 8 and whole


@triton.jit
def load_bytes(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Words of a plane of one bit, int32 `[T, PADDED]`, each with its three neighbours: it is byte `c % 4` of column c.

    Loaded as bytes they would make the tensor cores' operands four tokens deep, and every other operand to be moved.
    """
    p_fours = p_words.to(tl.pointer_type(tl.int32), bitcast=True)
    b_fours = load_words(p_fours, o_row, o_t, m_t, WORDS // 4, PADDED // 4, COUNT // 4)
    b_fours = tl.broadcast_to(b_fours[:, :, None], [o_t.shape[0], PADDED // 4, 4])
    return tl.reshape(b_fours, [o_t.shape[0], PADDED])


@triton.jit
def load_halves(p_words, b_places, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Words of a plane of two bits, int16 `[T, PADDED]`, out of words of 32 bits.

    With few of them to a token the compiler would load them one by one, and move every level instead of the words.
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
def levels(
    p_low, p_high, words, o_row, o_t, m_t,
    FIRST: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Tiles of float16 levels; the table of uneven ones is in `words` from `FIRST` on, as `byte_table` has it.

    Even ones are the codes less half the largest, times `unit`. The last of `words` is the tile of `places`, if any
    are needed.
    """
    if BITS == 1:
        b_words = load_bytes(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            ONE_BIT, ONE_BIT_REGISTERS, [b_words, words[len(words) - 1]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 2:
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
    elif EVEN:
        b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            FOUR_EVEN_BITS, FOUR_EVEN_BITS_REGISTERS, [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        b_words = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT)
        b_levels = tl.inline_asm_elementwise(
            FOUR_BITS, FOUR_BITS_REGISTERS,
            [b_words, words[FIRST], words[FIRST + 1], words[FIRST + 2], words[FIRST + 3]],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    if PADDED < 16:
        b_levels = joined(b_levels)
    return b_levels


@triton.jit
def joined(b_tiles):
    """Tiles of fewer columns than `tile_width` put beside each other in twos: a thread keeps the numbers it has."""
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
    """Warps that hold the sums of so many channels in registers."""
    return max(1, padded_words(width) // 16)


def even_tables(bits: int) -> list[torch.Tensor]:
    """The table that `levels` needs for even codes, if any."""
    return [byte_table((torch.arange(2**bits) - (2**bits - 1) / 2) * unit(bits), bits)] if bits in (2, 3) else []


def even_words(bits: int, width: int, device: torch.device) -> tuple[torch.Tensor | None, int]:
    """`KernelSide.words` and `places` for one component of even codes."""
    parts, count = even_tables(bits), places_needed(width, bits)
    if count:
        parts.append(places(count))
    return (torch.cat(parts).to(device) if parts else None), count


def places_needed(width: int, bits: int) -> int:
    """How many `places` the words of a component of so many channels and bits need."""
    words = padded_words(width)
    return words if bits in (1, 3) or (bits == 2 and words < 16) else 0


def places(words: int) -> torch.Tensor:
    """`prmt`'s selectors for words that are parts of words of 32 bits, int32 `[words]`.

    In the low half those of bytes A B A B: nibbles 0 and 2 of A's entry, 1 and 3 of B's. In the high half those of
    halves A B: the low byte of A's, the high one of B's.
    """
    own = torch.arange(words, dtype=torch.int32) % 4
    half = 0x5410 + 0x2222 * (own % 2)
    return own | (4 + own) << 4 | own << 8 | (4 + own) << 12 | half << 16


def byte_table(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels by code as `prmt`'s tables, int32: low bytes, then high bytes, of those from zero up for four bits."""
    halves = levels[len(levels) // 2 :].half() if bits == 4 else levels.half()
    return halves.view(torch.uint8).view(-1, 2).T.contiguous().view(torch.int32).flatten()
