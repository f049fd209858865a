"""Map queries to code space: one small kernel before the attention kernel.

    mapped = (q A) / top,   factor = top · scaling · log2 e,   bias = ⟨q, mean⟩ · scaling · log2 e

A packed token's logit, in base 2, is then its score against `mapped`, times `factor`, plus `bias`. `top` bounds `q A`
(max |q_d| times the largest 1-norm of a column of A), so `mapped` fits 16-bit operands whatever the query's range.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.operands import KernelSide, launch_options
from kvcache_compress.triton_kernels.common.plan import KernelCall

from .kernel import operand_place, padded

M = tl.constexpr(16)
"""Query rows per program."""
CHUNK = tl.constexpr(16)
"""Columns per program: many small programs read their part of A at once, as each waits for memory."""


@triton.jit(do_not_specialize=("rows",))  # else a multiple of 16 spills 680 bytes
def map_query_kernel(
    p_q, p_map, p_bound, p_mapped, p_rows, s_map, scaling, rows, heads,
    D: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Map `M` query rows of one head to a chunk of the `W` columns of code space.

    A has `COLUMNS` columns, one more if there is a bias, or 0 without a matrix. `HEADS` are the key heads, if each era
    maps the queries of all of them, else 0.
    """
    i_w, i_r, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    D_PAD: tl.constexpr = padded(D)
    DEPTH: tl.constexpr = 128 if D_PAD > 128 else D_PAD
    o_r, o_d = i_r * M + tl.arange(0, M), tl.arange(0, D_PAD)
    o_w = i_w * CHUNK + tl.arange(0, CHUNK)
    m_r = o_r < rows
    i_q = i_bh
    if HEADS > 0:
        i_q = i_bh // heads * HEADS + i_bh % HEADS
    p_q += i_q * rows * D
    p_map += i_bh % heads * s_map
    m_q = m_r[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_q + o_r[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(tl.float32)
    b_top = tl.full([M], 1.0, tl.float32)
    if p_mapped.dtype.element_ty != tl.float32:
        b_top = tl.max(tl.abs(b_q), 1)
        if COLUMNS > 0:
            b_top *= tl.load(p_bound)
        b_top = tl.where(b_top > 0, b_top, 1.0)
    if COLUMNS > 0:
        b_mapped = tl.zeros([M, CHUNK], tl.float32)
        for start in range(0, D_PAD, DEPTH):
            o_k = start + tl.arange(0, DEPTH)
            m_k = o_k < D
            b_part = tl.load(p_q + o_r[:, None] * D + o_k[None, :], mask=m_r[:, None] & m_k[None, :], other=0.0)
            b_map = tl.load(p_map + o_k[:, None] * COLUMNS + o_w[None, :], mask=m_k[:, None], other=0.0)
            b_mapped = tl.dot(b_part.to(tl.float32), b_map, b_mapped, input_precision="ieee")
    else:
        b_mapped = tl.load(p_q + o_r[:, None] * D + o_w[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)
    b_mapped = b_mapped / b_top[:, None]
    p_mapped += i_bh * rows * W
    p_place = p_mapped + o_r[:, None] * W + operand_place(o_w)[None, :]
    tl.store(p_place, b_mapped.to(p_mapped.dtype.element_ty), mask=m_r[:, None])
    if i_w == 0:
        b_bias = tl.zeros([M], tl.float32)
        if COLUMNS > W:
            b_mean = tl.load(p_map + o_d * COLUMNS + W, mask=o_d < D, other=0.0)
            # Products are rounded before lanes exchange them, see `launch_options`.
            b_bias = tl.sum(tl.fma(b_q, b_mean[None, :], 0.0), 1)
        o_row = (i_bh * rows + o_r) * 2
        tl.store(p_rows + o_row, b_top * scaling, mask=m_r)
        tl.store(p_rows + o_row + 1, b_bias * scaling, mask=m_r)


def map_query_call(
    side: KernelSide, query: torch.Tensor, heads: int, scaling: float, inputs: dict[str, Any]
) -> KernelCall:
    """Launch of `map_query_kernel` for contiguous queries `[B, Hq, n, D]`, result buffers included.

    `scaling` is in base 2; `inputs` are the changing arguments of `attend_kernel`. `p_mapped` is `[B, H, Hq / H * n,
    W]`, float32 where the query is, else float16; `p_rows` holds factor and bias. With eras `H` counts the heads of all
    eras.
    """
    batch, query_heads, count, dim = query.shape
    rows, width, matrix = query_heads // heads * count, sum(side.widths), side.matrix
    assert matrix is None or matrix.is_contiguous()
    key_heads = 0 if side.eras is None else heads
    if side.eras is not None and matrix is not None:
        heads = matrix.shape[0]
    operand = torch.float32 if query.dtype == torch.float32 else torch.float16
    arguments: dict[str, Any] = dict(
        p_q=query, p_map=query if matrix is None else matrix, p_bound=query if matrix is None else side.query_bound,
        p_mapped=query.new_empty(batch, heads, rows, width, dtype=operand),
        p_rows=query.new_empty(batch, heads, rows, 2, dtype=torch.float32),
        s_map=0 if matrix is None or matrix.shape[0] == 1 else matrix.stride(0), scaling=scaling, rows=rows,
        heads=heads, D=dim, W=width, COLUMNS=0 if matrix is None else matrix.shape[-1], HEADS=key_heads,
        **launch_options(),
    )  # fmt: skip
    return map_query_kernel, (width // CHUNK.value, -(-rows // M.value), batch * heads), arguments
