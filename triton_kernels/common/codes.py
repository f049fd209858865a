"""Bit planes in registers: unpacking for the attention kernel, packing for the encode kernels (see `layout.py`).

The codes of a tile of tokens are a tuple of tiles in code order, each with one field of all words: unpacking moves no
number between threads. If a token has fewer words than the tensor cores' K dimension, 16, a tile holds several fields,
one after the other.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def tile_width(words):
    """Columns of a tile of codes with `words` words per token, padding included."""
    return max(16, words)


@triton.constexpr_function
def divides(part, total):
    return total % part == 0


@triton.jit
def load_words(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load `COUNT` of a plane's `WORDS` words per token: `[T, PADDED]`; `o_row` is the row of the first token."""
    o_c = tl.arange(0, PADDED)
    m_w = m_t[:, None]
    if PADDED != COUNT:
        m_w = m_w & (o_c < COUNT)[None, :]
    return tl.load(p_words + o_row * WORDS + (o_t[:, None] * WORDS + o_c[None, :]), mask=m_w, other=0)


@triton.jit
def load_columns(p_words, o_row, o_t, m_t, WORDS: tl.constexpr):
    """Load a plane's words with tokens as columns: `[WORDS, T]`.

    So the compiler copies values, of which a register of the operands holds two tokens, to shared memory by 16 bytes.
    """
    o_w = o_t[None, :] * WORDS + tl.arange(0, WORDS)[:, None]
    return tl.load(p_words + o_row * WORDS + o_w, mask=m_t[None, :], other=0)


@triton.jit
def load_scales(p_scales, o_row, o_t, m_t):
    """Load a number per token, `[T]`, zero where `m_t` is false.

    Numbers of 8 and 16 bits are read as 32-bit words: the compiler prefetches nothing narrower, and in each iteration a
    warp would wait for memory. The last word may end up to three bytes behind the buffer, within PyTorch's allocation.
    """
    WIDTH: tl.constexpr = p_scales.dtype.element_ty.primitive_bitwidth
    if WIDTH == 32:
        b_scales = tl.load(p_scales + o_row + o_t, mask=m_t, other=0.0)
    else:
        SHIFT: tl.constexpr = 1 if WIDTH == 16 else 2
        o_n = o_row + o_t
        p_words = p_scales.to(tl.pointer_type(tl.int32), bitcast=True)
        b_words = tl.load(p_words + (o_n >> SHIFT), mask=m_t, other=0)
        b_words = b_words >> ((o_n & (2**SHIFT - 1)) * WIDTH).to(tl.int32)
        if WIDTH == 16:
            b_scales = b_words.to(tl.int16).to(p_scales.dtype.element_ty, bitcast=True)
        else:
            b_scales = (b_words & 255).to(p_scales.dtype.element_ty)
    return b_scales


JOINS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
"""Joins are faster, but before 3.9 Triton is wrong where an operand has one, 8-bit codes and 16 channels."""


@triton.jit
def load_row(p_numbers, COUNT: tl.constexpr):
    """Load `COUNT` neighbouring 16-bit numbers as words of 32 (see `load_scales`): `[1, COUNT]`."""
    p_twos = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True)
    if JOINS:
        b_twos = tl.load(p_twos + tl.arange(0, COUNT // 2)[None, :])
        b_words = tl.reshape(tl.join(b_twos, b_twos >> 16), [1, COUNT])
    else:
        o_n = tl.arange(0, COUNT)[None, :]
        b_words = tl.load(p_twos + (o_n >> 1)) >> (o_n % 2 * 16)
    return b_words.to(tl.int16).to(p_numbers.dtype.element_ty, bitcast=True)


@triton.constexpr_function
def in_halves(bits, padded, trellis):
    """True if a tile has the even words first, then the odd ones: trellis codes that are read by words of 32 bits."""
    return trellis and bits > 1 and padded >= 16


@triton.jit
def trellis_columns(BITS: tl.constexpr, PADDED: tl.constexpr):
    """Words of trellis codes in the order of a tile's columns."""
    o_c = tl.arange(0, PADDED)
    if in_halves(BITS, PADDED, True):
        o_c = o_c % (PADDED // 2) * 2 + o_c // (PADDED // 2)
    return o_c


@triton.jit
def load_registers(p_words, o_row, o_t, m_t, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the words of trellis codes (`quantizers/trellis.py`), each above the word before it: int32 `[T, PADDED]`."""
    o_c = trellis_columns(BITS, PADDED)
    o_before = tl.where(o_c == 0, WORDS - 1, o_c - 1)
    p_token = p_words + o_row * WORDS + o_t[:, None] * WORDS
    m_w = m_t[:, None] & (o_c < WORDS)[None, :]
    b_words = tl.load(p_token + o_c[None, :], mask=m_w, other=0).to(tl.int32)
    b_before = tl.load(p_token + o_before[None, :], mask=m_w, other=0).to(tl.int32)
    BITS_OF_WORD: tl.constexpr = 8 if BITS == 1 else 16
    return (b_words << BITS_OF_WORD) | (b_before & (2**BITS_OF_WORD - 1))


@triton.jit
def trellis_fields(b_both, b_high, o_j, BITS: tl.constexpr):
    """Indices of the levels in fields `o_j` of trellis codes, from `load_registers` and the high plane."""
    LOW: tl.constexpr = 1 if BITS == 1 else 2
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
    LOW: tl.constexpr = 4 if BITS >= 4 else (2 if BITS >= 2 else 1)
    b_codes = (b_low >> (LOW * o_j)) & (2**LOW - 1)
    if BITS > LOW:
        b_codes |= ((b_high >> ((BITS - LOW) * o_j)) & (2 ** (BITS - LOW) - 1)) << LOW
    return b_codes


@triton.jit
def load_codes(
    p_low, p_high, o_row, o_t, m_t,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
    TRELLIS: tl.constexpr = False,
):  # fmt: skip
    """Load the codes of a tile of tokens in code order, int32 tiles `[T, tile_width]`: indices of levels."""
    if TRELLIS:
        b_low = load_registers(p_low, o_row, o_t, m_t, BITS, WORDS, PADDED)
    else:
        b_low = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT).to(tl.int32)
    b_high = b_low
    if TRELLIS and BITS == 3:
        o_c = trellis_columns(BITS, PADDED)
        m_w = m_t[:, None] & (o_c < WORDS)[None, :]
        b_high = tl.load(p_high + o_row * WORDS + (o_t[:, None] * WORDS + o_c[None, :]), mask=m_w, other=0).to(tl.int32)
    elif BITS == 3 or BITS > 4:
        b_high = load_words(p_high, o_row, o_t, m_t, WORDS, PADDED, COUNT).to(tl.int32)
    FIELDS: tl.constexpr = tile_width(PADDED) // PADDED
    b_codes = ()
    for i in tl.static_range(8 // FIELDS):
        if FIELDS == 1:
            b_tile = trellis_fields(b_low, b_high, i, BITS) if TRELLIS else fields_of(b_low, b_high, i, BITS)
        else:
            o_j = (i * FIELDS + tl.arange(0, FIELDS))[None, :, None]
            b_lows, b_highs = b_low[:, None, :], b_high[:, None, :]
            b_tile = trellis_fields(b_lows, b_highs, o_j, BITS) if TRELLIS else fields_of(b_lows, b_highs, o_j, BITS)
            b_tile = tl.reshape(b_tile, [o_t.shape[0], FIELDS * PADDED])
        b_codes = b_codes + (b_tile,)
    return b_codes


@triton.jit
def tile_channels(i: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Channels of tile `i` of `load_codes`, and a mask of the columns that are not padding."""
    o_p = i * tile_width(PADDED) + tl.arange(0, tile_width(PADDED))
    o_d, m_d = o_p // PADDED * WORDS + o_p % PADDED, o_p % PADDED < WORDS
    return o_d, m_d


@triton.jit
def store_codes(
    b_codes, p_low, p_high, o_n, m_n, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, first=0
):
    """Pack and store int32 codes `[T, 8, PADDED]` as rows `o_n` of the planes, from word `first` on."""
    o_c = first + tl.arange(0, PADDED)
    o_w = o_n[:, None] * WORDS + o_c[None, :]
    m_w = m_n[:, None] & (o_c < WORDS)[None, :]
    LOW: tl.constexpr = 4 if BITS >= 4 else (2 if BITS >= 2 else 1)
    o_j = tl.arange(0, 8)
    b_low = tl.sum((b_codes & (2**LOW - 1)) << (LOW * o_j)[None, :, None], 1)
    tl.store(p_low + o_w, b_low.to(p_low.dtype.element_ty), mask=m_w)
    if BITS > LOW:
        HIGH: tl.constexpr = BITS - LOW
        b_high = tl.sum((b_codes >> LOW) << (HIGH * o_j)[None, :, None], 1)
        tl.store(p_high + o_w, b_high.to(p_high.dtype.element_ty), mask=m_w)
