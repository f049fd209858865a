"""KIVI's encoders: minimum, scale and codes of whole groups in one launch (Liu et al., section 3.2)."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.layout import PLANES, padded_width, padded_words, words_per_token
from kvcache_compress.triton_kernels.common.codes import store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, next_power_of_2

MAX_NUMBERS = 8192
"""Most numbers of a group of keys, over all channels: a program holds them all, and more would spill registers."""


class ScaleGroups(NamedTuple):
    """Bits, words, padded words and planes of a token's codes; tokens and channels that share a scale and a zero."""

    bits: int
    words: int
    padded: int
    planes: int
    tokens: int
    channels: int


@triton.jit
def encode_groups(
    p_x, o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h, D: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode whole groups (Liu et al., section 3.2): zero = min x, scale = (max x - min x) / (2^bits - 1), codes.

    A tile is viewed as `[groups, numbers that share a scale, channels]`; the last axis has length 1 for values.
    """
    T: tl.constexpr = o_x.shape[0]
    WORDS: tl.constexpr = META.words
    PADDED: tl.constexpr = META.padded
    SCALE: tl.constexpr = META.planes
    SIZE: tl.constexpr = META.tokens * META.channels
    AFTER: tl.constexpr = 8 * PADDED if META.tokens > 1 else 1
    GROUPS: tl.constexpr = T * 8 * PADDED // (SIZE * AFTER)
    o_c = tl.arange(0, 8 * PADDED)
    o_d = o_c // PADDED * WORDS + o_c % PADDED
    m_x = m_t[:, None] & (o_c % PADDED < WORDS)[None, :]
    b_x = tl.load(p_x + o_x[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.reshape(b_x, [GROUPS, SIZE, AFTER])
    b_low, b_high = tl.min(b_x, 1), tl.max(b_x, 1)
    b_zero = tl.minimum(tl.maximum(b_low, -65504.0), 65504.0).to(tl.float16)
    b_scale = tl.minimum(tl.div_rn(b_high - b_low, tl.full(b_low.shape, 2.0**META.bits - 1, tl.float32)), 65504.0)
    b_scale = b_scale.to(tl.float16)
    # All numbers of a group have the same offset; the maximum drops the axis.
    o_s = (o_row // META.tokens)[:, None] * (D // META.channels) + (o_d // META.channels)[None, :]
    o_s = tl.max(tl.reshape(o_s, [GROUPS, SIZE, AFTER]), 1)
    m_s = tl.max(tl.reshape(m_x.to(tl.int32), [GROUPS, SIZE, AFTER]), 1) > 0
    tl.store(fields[SCALE] + o_s, b_scale, mask=m_s)
    tl.store(fields[SCALE + 1] + o_s, b_zero, mask=m_s)
    # Codes are those of the scales and zero points as stored.
    b_steps = tl.div_rn(b_x - b_zero.to(tl.float32)[:, None, :], tl.maximum(b_scale.to(tl.float32), 1e-30)[:, None, :])
    b_codes = tl.minimum(tl.maximum(tl.floor(b_steps + 0.5), 0.0), 2**META.bits - 1).to(tl.int32)
    b_codes = tl.reshape(b_codes, [T, 8, PADDED])
    store_codes(b_codes, fields[0], fields[SCALE - 1], o_row, m_t, META.bits, WORDS, PADDED)


def kivi_encoder(context: CodecContext, bits: int, group: int) -> KernelEncoder | None:
    """Encoder for the codes of `kivi_side`, or None if their groups do not make power-of-two tiles."""
    width, keys = context.head_dim, context.side == "keys"
    words = words_per_token(width)
    fits = group * padded_width(width) <= MAX_NUMBERS if keys else words == padded_words(width)
    if group != next_power_of_2(group) or not fits:
        return None
    tokens, channels = (group, 1) if keys else (1, group)
    meta = ScaleGroups(bits, words, padded_words(width), len(PLANES[bits]), tokens, channels)
    return KernelEncoder(encode_groups, meta, (), tokens)
