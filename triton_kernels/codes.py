"""Bit planes in registers: unpacking for the attention kernel, packing for the encode kernels (see `layout.py`)."""

import triton
import triton.language as tl


@triton.jit
def load_codes(p_low, p_high, o_row, o_t, m_t, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Codes of a tile of tokens, int32 `[T, 8 * PADDED]` in code order; `o_row` is the buffer's row of token 0."""
    o_c = tl.arange(0, PADDED)
    o_w = (o_row + o_t)[:, None] * WORDS + o_c[None, :]
    m_w = m_t[:, None]
    if PADDED != WORDS:
        m_w = m_w & (o_c < WORDS)[None, :]
    LOW: tl.constexpr = 4 if BITS >= 4 else (2 if BITS >= 2 else 1)
    o_j = tl.arange(0, 8)
    b_low = tl.load(p_low + o_w, mask=m_w, other=0).to(tl.int32)
    b_codes = (b_low[:, None, :] >> (LOW * o_j)[None, :, None]) & (2**LOW - 1)
    if BITS > LOW:
        HIGH: tl.constexpr = BITS - LOW
        b_high = tl.load(p_high + o_w, mask=m_w, other=0).to(tl.int32)
        b_codes |= ((b_high[:, None, :] >> (HIGH * o_j)[None, :, None]) & (2**HIGH - 1)) << LOW
    return tl.reshape(b_codes, [o_t.shape[0], 8 * PADDED])


@triton.jit
def store_codes(b_codes, p_low, p_high, o_n, m_n, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Packs and stores int32 codes `[T, 8, PADDED]` as rows `o_n` of the planes."""
    o_c = tl.arange(0, PADDED)
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
