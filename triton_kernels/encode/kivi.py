"""KIVI's encoders: minimum, scale and codes of whole groups in one launch (Liu et al., section 3.2)."""

from typing import NamedTuple

import triton
import triton.language as tl

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.layout import padded_width
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, planes, store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, next_power_of_2

MAX_NUMBERS = 8192
"""Most numbers of a group of keys, over all channels: a program holds them all, and more would spill registers."""


class ScaleGroups(NamedTuple):
    """Codes of a token, and the tokens and channels that share a scale and a zero."""

    codes: Codes
    tokens: int
    channels: int


@triton.jit
def encode_groups(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode whole groups (Liu et al., section 3.2): zero = min x, scale = (max x - min x) / (2^bits - 1), codes.

    A tile is viewed as `[groups, numbers that share a scale, channels]`; the last axis has length 1 for values.
    """
    T: tl.constexpr = tile.o_x.shape[0]
    CODES: tl.constexpr = META.codes
    BITS: tl.constexpr = CODES.bits
    WORDS: tl.constexpr = CODES.words
    PADDED: tl.constexpr = CODES.padded
    SIZE: tl.constexpr = META.tokens * META.channels
    AFTER: tl.constexpr = 8 * PADDED if META.tokens > 1 else 1
    GROUPS: tl.constexpr = T * 8 * PADDED // (SIZE * AFTER)
    o_c = tl.arange(0, 8 * PADDED)
    o_d = o_c // PADDED * WORDS + o_c % PADDED
    m_x = tile.m_t[:, None] & (o_c % PADDED < WORDS)[None, :]
    b_x = tl.load(tile.p_x + tile.o_x[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.reshape(b_x, [GROUPS, SIZE, AFTER])
    b_low, b_high = tl.min(b_x, 1), tl.max(b_x, 1)
    b_zero = tl.minimum(tl.maximum(b_low, -65504.0), 65504.0).to(tl.float16)
    b_scale = tl.minimum(tl.div_rn(b_high - b_low, tl.full(b_low.shape, 2.0**BITS - 1, tl.float32)), 65504.0)
    b_scale = b_scale.to(tl.float16)
    # All numbers of a group have the same offset; the maximum drops the axis.
    o_s = (tile.o_row // META.tokens)[:, None] * (D // META.channels) + (o_d // META.channels)[None, :]
    o_s = tl.max(tl.reshape(o_s, [GROUPS, SIZE, AFTER]), 1)
    m_s = tl.max(tl.reshape(m_x.to(tl.int32), [GROUPS, SIZE, AFTER]), 1) > 0
    tl.store(tile.fields[planes(BITS)] + o_s, b_scale, mask=m_s)
    tl.store(tile.fields[planes(BITS) + 1] + o_s, b_zero, mask=m_s)
    # Codes are those of the scales and zero points as stored.
    b_steps = tl.div_rn(b_x - b_zero.to(tl.float32)[:, None, :], tl.maximum(b_scale.to(tl.float32), 1e-30)[:, None, :])
    b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5), 0.0), 2**BITS - 1).to(tl.int32)
    store_codes(tl.reshape(b_codes, [T, 8, PADDED]), tile, CODES)


def kivi_encoder(context: CodecContext, bits: int, group: int) -> KernelEncoder | None:
    """Encoder for the codes of `kivi_side`, or None if their groups do not make power-of-two tiles."""
    width, keys = context.head_dim, context.side == "keys"
    codes = codes_of(bits, width, 0)
    fits = group * padded_width(width) <= MAX_NUMBERS if keys else codes.words == codes.padded
    if group != next_power_of_2(group) or not fits:
        return None
    tokens, channels = (group, 1) if keys else (1, group)
    meta = ScaleGroups(codes, tokens, channels)
    return KernelEncoder(encode_groups, meta, (), tokens)
