"""Unpack trellis codes of two and three bits to float16 levels, by assembly: the fast path on NVIDIA GPUs.

`codecs/quantizers/trellis.py` has the codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.assembly import (
    assembled,
    block,
    byte_table,
    joined,
    load_bytes,
    load_halves,
    pairs,
    text,
)
from kvcache_compress.triton_kernels.common.codes import in_halves


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


TRELLIS_TWO, TRELLIS_THREE = block(_trellis(2), 8, 10), block(_trellis(3), 8, 14)
TWO_WORDS, THREE_WORDS = block(_trellis_words(2), 16, 12), block(_trellis_words(3), 16, 13)


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
    """Tiles of float16 levels for trellis codes of two or three bits; see `levels`."""
    b_table = words[FIRST : FIRST + 4]
    if in_halves(BITS, PADDED, True):
        b_words, b_before = load_twos(p_low, o_row, o_t, m_t, WORDS, PADDED)
        if BITS == 2:
            b_halves = assembled(TWO_WORDS, (b_words, b_before) + b_table, 16)
        else:
            p_halves = p_high.to(tl.pointer_type(tl.int16), bitcast=True)
            b_high = load_halves(p_halves, words[len(words) - 1], o_row, o_t, m_t, WORDS // 2, PADDED // 2, WORDS // 2)
            b_halves = assembled(THREE_WORDS, (b_words, b_before, b_high) + b_table, 16)
        b_levels = ()
        for i in tl.static_range(8):
            b_levels = b_levels + joined((b_halves[i], b_halves[i + 8]))
    elif BITS == 2:
        b_words = load_pairs(p_low, o_row, o_t, m_t, WORDS, PADDED)
        b_levels = assembled(TRELLIS_TWO, (b_words,) + b_table)
    else:
        b_words = load_pairs(p_low, o_row, o_t, m_t, WORDS, PADDED)
        b_high = load_bytes(p_high, o_row, o_t, m_t, WORDS, PADDED, WORDS)
        b_levels = assembled(TRELLIS_THREE, (b_words, b_high, words[len(words) - 1]) + b_table)
    if PADDED < 16:
        b_levels = joined(b_levels)
    return b_levels


def trellis_table(levels: torch.Tensor, bits: int, padded: int) -> torch.Tensor:
    """`byte_table` of the levels of trellis codes; where their words are read by 32 bits, bits 1 and 2 swap places."""
    if in_halves(bits, padded, True):
        index = torch.arange(len(levels), device=levels.device)
        levels = levels[index & ~6 | (index & 2) << 1 | (index & 4) >> 1]
    return byte_table(levels, bits + 1)
