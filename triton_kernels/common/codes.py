"""Bit planes in registers: unpacking for the attention kernel, packing for the encode kernels (see `layout.py`).

The codes of a tile of tokens are a tuple of tiles in code order, each with one field of all words: unpacking moves no
number between threads. If a token has fewer words than the tensor cores' K dimension, 16, a tile holds several fields,
one after the other.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES, padded_words, words_per_token


class PackedTile(NamedTuple):
    """A tile of `T` packed tokens, which lies within one group of tokens or starts with one.

    fields: pointers to the store's buffers, in the order of `Codec.fields`.
    tables, words: pointers to `KernelSide.tables`, and `KernelSide.words` as tiles, empty unless on the fast path.
    p_rope: float16 `[tokens, 2 * rotary]`, cos and sin from the tile's first token on, if the codec uses them.
    i_h: key/value head; s_head: rows between heads; o_row: int64 row of the first token; o_t: 0 to T - 1; m_t: mask.
    """

    fields: Any
    tables: Any
    words: Any
    p_rope: Any
    i_h: Any
    s_head: Any
    o_row: Any
    o_t: Any
    m_t: Any


class NewTile(NamedTuple):
    """A tile of `T` tokens to encode.

    p_x, o_x, m_t: the `D` numbers of a token begin at `p_x + o_x` `[T]`, where `m_t`.
    fields, o_row: pointers to the store's buffers, and the rows `[T]` of the tokens there.
    p_rope, o_token: cos and sin of the first token of each group of packed tokens, if the method uses them, and the
        numbers `[T]` of the packed tokens in their sequence.
    tables, i_h: pointers to `KernelEncoder.tables`; key/value head.
    """

    p_x: Any
    o_x: Any
    m_t: Any
    fields: Any
    o_row: Any
    p_rope: Any
    o_token: Any
    tables: Any
    i_h: Any


@triton.jit
def in_block(fields, i_block, STRIDES: tl.constexpr):
    """Pointers to a block of each field; without strides, the fields themselves."""
    found = ()
    for i in tl.static_range(len(STRIDES)):
        found = found + (fields[i] + i_block * STRIDES[i],)
    return found if len(STRIDES) > 0 else fields


class Codes(NamedTuple):
    """Constants of codes in bit planes: bits of a code, field of the low plane, words of a token in each plane.

    first, count, padded: first word to read, number of words, and that number as a power of two.
    """

    bits: int
    field: int
    words: int
    first: int
    count: int
    padded: int


def codes_of(bits: int, width: int, field: int) -> Codes:
    """Constants of all `width` codes of a token."""
    words = words_per_token(width)
    return Codes(bits, field, words, 0, words, padded_words(width))


@triton.constexpr_function
def tile_width(words):
    """Columns of a tile of codes with `words` words per token, padding included."""
    return max(16, words)


@triton.constexpr_function
def divides(part, total):
    return total % part == 0


@triton.constexpr_function
def planes(bits):
    """Number of bit planes."""
    return len(PLANES[bits])


@triton.constexpr_function
def low_bits(bits):
    """Bits of the low plane."""
    return PLANES[bits][0]


@triton.jit
def low_plane(tile, CODES: tl.constexpr):
    return tile.fields[CODES.field] + CODES.first


@triton.jit
def high_plane(tile, CODES: tl.constexpr):
    """The plane that follows the low one; the low one where there is no other."""
    return tile.fields[CODES.field + planes(CODES.bits) - 1] + CODES.first


@triton.jit
def load_words(p_words, tile, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load `COUNT` of a plane's `WORDS` words per token: `[T, PADDED]`."""
    o_c = tl.arange(0, PADDED)
    m_w = tile.m_t[:, None]
    if PADDED != COUNT:
        m_w = m_w & (o_c < COUNT)[None, :]
    return tl.load(p_words + tile.o_row * WORDS + (tile.o_t[:, None] * WORDS + o_c[None, :]), mask=m_w, other=0)


@triton.jit
def load_columns(p_words, tile, WORDS: tl.constexpr):
    """Load a plane's words with tokens as columns, `[WORDS, T]`: a register of the values' operands holds two tokens.

    The compiler copies words of 32 bits to shared memory in the order of this load: of each eight tokens, a sector of
    0, 2, 4, 6, 1, 3, 5, 7. So the lanes that read words together, of four tokens two apart, use different banks.
    """
    p_words += tile.o_row * WORDS
    if p_words.dtype.element_ty.primitive_bitwidth < 32:  # copied by 16 bytes; the order would cost more than it saves
        o_w = tile.o_t[None, :] * WORDS + tl.arange(0, WORDS)[:, None]
        return tl.load(p_words + o_w, mask=tile.m_t[None, :], other=0)
    T: tl.constexpr = tile.o_t.shape[0]
    SHAPE: tl.constexpr = [WORDS // 8, T // 8, 2, 4, 8]
    o_n = tl.arange(0, T * WORDS)
    o_t = o_n // 64 % (T // 8) * 8 + o_n // 8 % 4 * 2 + o_n // 32 % 2
    m_t = tl.permute(tl.reshape(tile.m_t, [T // 8, 4, 2]), [0, 2, 1])[None, :, :, :, None]
    p_words += o_t * WORDS + o_n // (8 * T) * 8 + o_n % 8
    b_words = tl.reshape(tl.load(p_words, mask=tl.ravel(tl.broadcast_to(m_t, SHAPE)), other=0), SHAPE)
    return tl.reshape(tl.permute(b_words, [0, 4, 1, 3, 2]), [WORDS, T])


@triton.jit
def load_scales(p_scales, tile):
    """Load a number per token, `[T]`, zero where the mask is false.

    Numbers of 8 or 16 bits are read as 32-bit words: the compiler prefetches nothing narrower, and in each iteration a
    warp would wait for memory. The last word may end up to three bytes behind the buffer, within PyTorch's allocation.
    """
    WIDTH: tl.constexpr = p_scales.dtype.element_ty.primitive_bitwidth
    o_n = tile.o_row + tile.o_t
    SHIFT: tl.constexpr = 1 if WIDTH == 16 else 2
    p_words = p_scales.to(tl.pointer_type(tl.int32), bitcast=True)
    b_words = tl.load(p_words + (o_n >> SHIFT), mask=tile.m_t, other=0)
    b_words = b_words >> ((o_n & (2**SHIFT - 1)) * WIDTH).to(tl.int32)
    if WIDTH == 16:
        b_scales = b_words.to(tl.int16).to(p_scales.dtype.element_ty, bitcast=True)
    else:
        b_scales = (b_words & 255).to(p_scales.dtype.element_ty)
    return b_scales


TRITON_39 = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
"""Before 3.9 joins give a lane four neighbouring columns of an operand, and break 8-bit codes with 16 channels."""


@triton.jit
def load_row(p_numbers, COUNT: tl.constexpr):
    """Load `COUNT` neighbouring 16-bit numbers as words of 32 (see `load_scales`): `[1, COUNT]`."""
    p_twos = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True)
    if TRITON_39:
        b_twos = tl.load(p_twos + tl.arange(0, COUNT // 2)[None, :])
        b_words = tl.reshape(tl.join(b_twos, b_twos >> 16), [1, COUNT])
    else:
        o_n = tl.arange(0, COUNT)[None, :]
        b_words = tl.load(p_twos + (o_n >> 1)) >> (o_n % 2 * 16)
    return b_words.to(tl.int16).to(p_numbers.dtype.element_ty, bitcast=True)


@triton.constexpr_function
def in_halves(bits, padded, trellis):
    """True if a tile has the even words first, then the odd ones: trellis codes that are read by words of 32 bits."""
    return trellis and bits > 1 and padded >= 8


@triton.jit
def load_trellis(tile, CODES: tl.constexpr):
    """Load the words of trellis codes (`quantizers/trellis.py`), int32 `[T, PADDED]` in the order of a tile's columns.

    Returns the low plane's words, each above the word before it, and the high plane's, if there are any.
    """
    WORDS: tl.constexpr = CODES.words
    o_c = tl.arange(0, CODES.padded)
    if in_halves(CODES.bits, CODES.padded, True):
        o_c = o_c % (CODES.padded // 2) * 2 + o_c // (CODES.padded // 2)
    o_before = tl.where(o_c == 0, WORDS - 1, o_c - 1)
    m_w = tile.m_t[:, None] & (o_c < WORDS)[None, :]
    p_token = low_plane(tile, CODES) + tile.o_row * WORDS + tile.o_t[:, None] * WORDS
    b_words = tl.load(p_token + o_c[None, :], mask=m_w, other=0).to(tl.int32)
    b_before = tl.load(p_token + o_before[None, :], mask=m_w, other=0).to(tl.int32)
    BITS_OF_WORD: tl.constexpr = 8 if CODES.bits == 1 else 16
    b_low = (b_words << BITS_OF_WORD) | (b_before & (2**BITS_OF_WORD - 1))
    b_high = b_low
    if CODES.bits == 3:
        o_w = tile.o_row * WORDS + (tile.o_t[:, None] * WORDS + o_c[None, :])
        b_high = tl.load(high_plane(tile, CODES) + o_w, mask=m_w, other=0).to(tl.int32)
    return b_low, b_high


@triton.jit
def trellis_fields(b_both, b_high, o_j, BITS: tl.constexpr):
    """Indices of the levels in fields `o_j` of trellis codes, from `load_trellis`."""
    LOW: tl.constexpr = low_bits(BITS)
    b_stream = b_both if BITS == 1 else b_both & 0x55555555
    b_low = b_stream ^ (b_stream << LOW) ^ (b_stream << 6 * LOW)
    b_upper = (b_stream << 2 * LOW) ^ (b_stream << 4 * LOW)
    o_place = LOW * (o_j + 8)
    b_codes = ((b_low >> o_place) & 1) | ((b_upper >> o_place) & 1) << 1
    if BITS > 1:
        b_codes |= ((b_both >> (o_place + 1)) & 1) << 2
    if BITS > 2:
        b_codes |= ((b_high >> o_j) & 1) << 3
    return b_codes


@triton.jit
def fields_of(b_low, b_high, o_j, BITS: tl.constexpr):
    """Codes in fields `o_j` of int32 words from the low and the high plane."""
    LOW: tl.constexpr = low_bits(BITS)
    b_codes = (b_low >> (LOW * o_j)) & (2**LOW - 1)
    if BITS > LOW:
        b_codes |= ((b_high >> ((BITS - LOW) * o_j)) & (2 ** (BITS - LOW) - 1)) << LOW
    return b_codes


@triton.jit
def load_codes(tile, CODES: tl.constexpr, TRELLIS: tl.constexpr = False):
    """Load the codes of a tile of tokens in code order, int32 tiles `[T, tile_width]`: indices of levels."""
    BITS: tl.constexpr = CODES.bits
    FIELDS: tl.constexpr = tile_width(CODES.padded) // CODES.padded
    if TRELLIS:
        b_low, b_high = load_trellis(tile, CODES)
    else:
        b_low = load_words(low_plane(tile, CODES), tile, CODES.words, CODES.padded, CODES.count).to(tl.int32)
        b_high = b_low
        if planes(BITS) > 1:
            b_high = load_words(high_plane(tile, CODES), tile, CODES.words, CODES.padded, CODES.count).to(tl.int32)
    if FIELDS > 1:
        b_low, b_high = b_low[:, None, :], b_high[:, None, :]
    b_codes = ()
    for i in tl.static_range(8 // FIELDS):
        o_j = i
        if FIELDS > 1:
            o_j = (i * FIELDS + tl.arange(0, FIELDS))[None, :, None]
        b_tile = trellis_fields(b_low, b_high, o_j, BITS) if TRELLIS else fields_of(b_low, b_high, o_j, BITS)
        if FIELDS > 1:
            b_tile = tl.reshape(b_tile, [tile.o_t.shape[0], FIELDS * CODES.padded])
        b_codes = b_codes + (b_tile,)
    return b_codes


@triton.jit
def tile_channels(i: tl.constexpr, CODES: tl.constexpr):
    """Channels of tile `i` of `load_codes`, and a mask of the columns that are not padding."""
    o_p = i * tile_width(CODES.padded) + tl.arange(0, tile_width(CODES.padded))
    return o_p // CODES.padded * CODES.words + o_p % CODES.padded, o_p % CODES.padded < CODES.words


@triton.jit
def store_codes(b_codes, tile, CODES: tl.constexpr, first=0):
    """Pack and store int32 codes `[T, 8, PADDED]` of a `NewTile`, from word `first` on."""
    LOW: tl.constexpr = low_bits(CODES.bits)
    HIGH: tl.constexpr = CODES.bits - LOW
    p_low, p_high = low_plane(tile, CODES), high_plane(tile, CODES)
    o_c = first + tl.arange(0, CODES.padded)
    o_w = tile.o_row[:, None] * CODES.words + o_c[None, :]
    m_w = tile.m_t[:, None] & (o_c < CODES.words)[None, :]
    o_j = tl.arange(0, 8)
    b_low = tl.sum((b_codes & (2**LOW - 1)) << (LOW * o_j)[None, :, None], 1)
    tl.store(p_low + o_w, b_low.to(p_low.dtype.element_ty), mask=m_w)
    if HIGH:
        b_high = tl.sum((b_codes >> LOW) << (HIGH * o_j)[None, :, None], 1)
        tl.store(p_high + o_w, b_high.to(p_high.dtype.element_ty), mask=m_w)
