"""KIVI's device functions and encode kernel: `x = code * scale + zero`, grouped along tokens or channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..layout import PLANE_WORD, PLANES, padded_width, padded_words, words_per_token
from .codes import load_codes, store_codes
from .operands import KernelSide, in_code_order, launch_options

if TYPE_CHECKING:
    from ..methods.kivi import KIVICodec


@triton.jit
def decoded(
    fields, o_row, o_t, m_t, DTYPE: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Decoded tokens `[T, 8 * PADDED]`; a scale is shared by `TOKENS` tokens and `CHANNELS` channels."""
    SCALE: tl.constexpr = 1 if (BITS == 1 or BITS == 2 or BITS == 4) else 2
    b_codes = load_codes(fields[0], fields[SCALE - 1], o_row, o_t, m_t, BITS, WORDS, PADDED)
    o_p = tl.arange(0, 8 * PADDED)
    o_d = o_p // PADDED * WORDS + o_p % PADDED
    o_s = ((o_row + o_t) // TOKENS)[:, None] * (8 * WORDS // CHANNELS) + (o_d // CHANNELS)[None, :]
    m_s = m_t[:, None]
    if PADDED != WORDS:
        m_s = m_s & (o_p % PADDED < WORDS)[None, :]
    b_scale = tl.load(fields[SCALE] + o_s, mask=m_s, other=0.0).to(tl.float32)
    b_zero = tl.load(fields[SCALE + 1] + o_s, mask=m_s, other=0.0).to(tl.float32)
    return (b_codes.to(tl.float32) * b_scale + b_zero).to(DTYPE)


@triton.jit
def score(b_q, fields, tables, p_rope, i_h, o_row, o_t, m_t, META: tl.constexpr, PRECISION: tl.constexpr):
    b_k = decoded(fields, o_row, o_t, m_t, b_q[0].dtype, META[0], META[1], META[2], META[3], META[4])
    return tl.dot(b_q[0], tl.trans(b_k), input_precision=PRECISION)


@triton.jit
def accumulate(
    b_p, fields, tables, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b_v = decoded(fields, o_row, o_t, m_t, DTYPE, META[0], META[1], META[2], META[3], META[4])
    return (tl.dot(b_p.to(DTYPE), b_v, b_acc[0], input_precision=PRECISION),)


def kivi_side(codec: KIVICodec) -> KernelSide:
    """Operands of a KIVI codec: code space is the head's own space, up to padding."""
    width, group = codec.context.head_dim, codec.options.group_size
    tokens, channels = (group, 1) if codec.context.side == "keys" else (1, group)
    meta = (codec.options.bits, words_per_token(width), padded_words(width), tokens, channels)
    side = KernelSide(score, accumulate, meta, (padded_width(width),))
    if padded_width(width) != width:
        identity = torch.eye(width, device=codec.context.device).unsqueeze(0)
        side.output_map = in_code_order(identity, (width,)).contiguous()
        side.query_map = side.output_map.mT.contiguous()
    return side


@triton.jit(do_not_specialize=("N",))
def quantize_kernel(
    p_x, p_scale, p_zero, p_low, p_high, N,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """code = clamp(floor((x - zero) / scale + 1/2)), packed."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_c = tl.arange(0, PADDED)
    o_d = tl.arange(0, 8)[:, None] * WORDS + o_c[None, :]
    m_x = m_n[:, None, None] & (o_c < WORDS)[None, None, :]
    b_x = tl.load(p_x + o_n[:, None, None] * (8 * WORDS) + o_d[None, :, :], mask=m_x, other=0.0)
    o_s = (o_n // TOKENS)[:, None, None] * (8 * WORDS // CHANNELS) + (o_d // CHANNELS)[None, :, :]
    b_scale = tl.load(p_scale + o_s, mask=m_x, other=1.0).to(tl.float32)
    b_zero = tl.load(p_zero + o_s, mask=m_x, other=0.0).to(tl.float32)
    b_steps = tl.div_rn(b_x - b_zero, tl.maximum(b_scale, 1e-30))
    b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5), 0.0), 2**BITS - 1).to(tl.int32)
    store_codes(b_codes, p_low, p_high, o_n, m_n, BITS, WORDS, PADDED)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, tokens: int, channels: int
) -> tuple[torch.Tensor, ...]:
    """`methods.kivi.quantize` by the kernel: float32 `x` `[B, H, T, D]` to bit planes."""
    grid, arguments, planes = quantize_arguments(x, scale, zero, bits, tokens, channels)
    quantize_kernel[grid](**arguments)
    return planes


def quantize_arguments(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, tokens: int, channels: int
) -> tuple[tuple[int], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Grid and arguments of `quantize_kernel`, and the planes that it fills."""
    width = x.shape[-1]
    words = words_per_token(width)
    rows = x.numel() // width
    planes = tuple(x.new_empty(*x.shape[:-1], words, dtype=PLANE_WORD[plane]) for plane in PLANES[bits])
    block = 8 if width > 64 else 16
    arguments = dict(
        p_x=x.contiguous(), p_scale=scale.contiguous(), p_zero=zero.contiguous(),
        p_low=planes[0], p_high=planes[-1], N=rows,
        BITS=bits, WORDS=words, PADDED=padded_words(width), TOKENS=tokens, CHANNELS=channels, BLOCK=block,
        **launch_options(),
    )  # fmt: skip
    return (triton.cdiv(rows, block),), arguments, planes
