"""Bit planes in registers: unpacking for the attention kernel, packing for the encode kernels (see `layout.py`).

The codes of a tile of tokens are a tuple of tiles in code order, each with one field of all words: unpacking moves no
number between threads. If a token has fewer than 16 words, the depth of the tensor cores' operands, a tile holds
several fields, one after the other.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def tile_width(words):
    """Columns of a tile of codes with `words` words per token, padding included."""
    return max(16, words)


@triton.jit
def load_words(p_words, o_row, o_t, m_t, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load `COUNT` of a plane's `WORDS` words per token: `[T, PADDED]`; `o_row` is the row of the first token."""
    o_c = tl.arange(0, PADDED)
    m_w = m_t[:, None]
    if PADDED != COUNT:
        m_w = m_w & (o_c < COUNT)[None, :]
    return tl.load(p_words + o_row * WORDS + (o_t[:, None] * WORDS + o_c[None, :]), mask=m_w, other=0)


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
):  # fmt: skip
    """Load the codes of a tile of tokens as int32 tiles `[T, tile_width]` in code order."""
    b_low = load_words(p_low, o_row, o_t, m_t, WORDS, PADDED, COUNT).to(tl.int32)
    b_high = b_low
    if BITS == 3 or BITS > 4:
        b_high = load_words(p_high, o_row, o_t, m_t, WORDS, PADDED, COUNT).to(tl.int32)
    FIELDS: tl.constexpr = tile_width(PADDED) // PADDED
    b_codes = ()
    for i in tl.static_range(8 // FIELDS):
        if FIELDS == 1:
            b_tile = fields_of(b_low, b_high, i, BITS)
        else:
            o_j = (i * FIELDS + tl.arange(0, FIELDS))[None, :, None]
            b_tile = fields_of(b_low[:, None, :], b_high[:, None, :], o_j, BITS)
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
