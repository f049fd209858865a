"""Device functions of uncompressed tokens: the simplest example of the contract that all device functions follow.

SCORE(b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t, META, FAST) -> [T, M] float32
    b_q: tuple of query tiles `[width, M]`, one per entry of `KernelSide.widths`, in the operands' dtype; rotated
    queries (`spectral.py`) are those of the tile's group, followed by their constants `[M]`;
    fields: tuple of pointers to the store's buffers, in the order of `Codec.fields`;
    words: `KernelSide.words`, as tiles; empty unless FAST;
    p_rope: float16 `[tokens, 2 * rotary]`, cos and sin from the tile's first token on, if the codec uses them;
    i_h: key/value head; s_head: stride between heads, in rows; o_row: int64 row of the tile's first token,
    s_head * (batch * H + i_h) + token, the token a multiple of T, so that a tile lies within one group of tokens or
    starts with one; o_t: 0 to T - 1; m_t: mask.
ACCUMULATE(b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc, META, DTYPE, FAST)
    -> tuple of [width, M]
    b_p: float32 weights `[T, M]`; b_acc: the float32 sums so far; DTYPE: the operands' dtype.
Products of float32 operands are exact (`input_precision="ieee"`); 16-bit ones are not affected by that.
FAST: True if 16-bit operands may be unpacked by NVIDIA assembly (`assembly.py`); the other path is portable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.triton_kernels.common.operands import KernelSide


class Width(NamedTuple):
    """Head dimension, and the next power of two."""

    dim: int
    padded: int


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s = q · k"""
    o_d = tl.arange(0, META.padded)
    m_d = m_t[:, None] & (o_d < META.dim)[None, :]
    b_k = tl.load(fields[0] + (o_row + o_t)[:, None] * META.dim + o_d[None, :], mask=m_d, other=0.0)
    return tl.dot(b_k.to(b_q[0].dtype), b_q[0], input_precision="ieee")


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc += p v"""
    o_d = tl.arange(0, META.padded)
    m_d = m_t[:, None] & (o_d < META.dim)[None, :]
    b_v = tl.load(fields[0] + (o_row + o_t)[:, None] * META.dim + o_d[None, :], mask=m_d, other=0.0)
    return (tl.dot(tl.trans(b_v.to(DTYPE)), b_p.to(DTYPE), b_acc[0], input_precision="ieee"),)


def dense_side(context: CodecContext) -> KernelSide:
    """Kernel operands of dense tokens: code space is the head's space, padded."""
    dim, keys = context.head_dim, context.side == "keys"
    padded = max(16, triton.next_power_of_2(dim))
    side = KernelSide(score if keys else accumulate, Width(dim, padded), (padded,))
    if padded != dim:
        spread = torch.eye(padded, dim, device=context.device).unsqueeze(0)
        side.matrix = spread.mT.contiguous() if keys else spread
    return side
