"""Multiply tokens by rows of a rotation or a sketch, for the encoders that begin with that."""

import triton
import triton.language as tl


@triton.jit
def rotated(
    p_x, o_x, m_t, p_rows, o_row, m_row, p_mean, D: tl.constexpr, CENTRED: tl.constexpr, PRECISION: tl.constexpr
):
    """Products of tokens `p_x + o_x`, less the mean, with rows `o_row`: float32 `[T, rows]`, zero unless `m_row`."""
    DEPTH: tl.constexpr = 32
    b_z = tl.zeros([o_x.shape[0], o_row.shape[0]], tl.float32)
    for start in range(0, D, DEPTH):
        o_k = start + tl.arange(0, DEPTH)
        m_k = o_k < D
        b_x = tl.load(p_x + o_x[:, None] + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        if CENTRED:
            b_x -= tl.load(p_mean + o_k, mask=m_k, other=0.0)[None, :]
        b_rows = tl.load(p_rows + o_row[:, None] * D + o_k[None, :], mask=m_row[:, None] & m_k[None, :], other=0.0)
        b_z = tl.dot(b_x, tl.trans(b_rows), b_z, input_precision=PRECISION)
    return b_z
