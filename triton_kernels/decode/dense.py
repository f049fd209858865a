"""Device functions of uncompressed tokens: the simplest example of the contract that all device functions follow.

SCORE(b_q, tile, META, FAST) -> [T, M] float32
    b_q: tuple of query tiles `[width, M]`, one per entry of `KernelSide.widths`, in the operands' dtype; rotated
    queries (`spectral.py`) are those of the tile's group, followed by their constants `[M]`;
    tile: `codes.PackedTile`.
ACCUMULATE(b_p, tile, b_acc, META, DTYPE, FAST) -> tuple of [width, M]
    b_p: float32 weights `[T, M]`; b_acc: the float32 sums so far; DTYPE: the operands' dtype.
Products of float32 operands are exact (`input_precision="ieee"`); 16-bit ones are not affected by that.
FAST: True if 16-bit operands may be unpacked by NVIDIA assembly (`assembly.py`); the other path is portable.
"""

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
def load_tokens(tile, META: tl.constexpr):
    """Load tokens, zero where there are none: `[T, padded]`."""
    o_d = tl.arange(0, META.padded)
    m_d = tile.m_t[:, None] & (o_d < META.dim)[None, :]
    o_token = (tile.o_row + tile.o_t)[:, None] * META.dim
    return tl.load(tile.fields[0] + o_token + o_d[None, :], mask=m_d, other=0.0)


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s = q · k"""
    return tl.dot(load_tokens(tile, META).to(b_q[0].dtype), b_q[0], input_precision="ieee")


@triton.jit
def accumulate(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """acc += p v"""
    b_v = tl.trans(load_tokens(tile, META).to(DTYPE))
    return (tl.dot(b_v, b_p.to(DTYPE), b_acc[0], input_precision="ieee"),)


def dense_side(context: CodecContext) -> KernelSide:
    """Kernel operands of dense tokens: code space is the head's space, padded."""
    dim, keys = context.head_dim, context.side == "keys"
    padded = max(16, triton.next_power_of_2(dim))
    # More values at a time spill registers, up to 5 KB of each thread beside keys of two bits.
    side = KernelSide(score if keys else accumulate, Width(dim, padded), (padded,), tokens=32 if keys else 16)
    if padded != dim:
        spread = torch.eye(padded, dim, device=context.device).unsqueeze(0)
        side.matrix = spread.mT.contiguous() if keys else spread
    return side
