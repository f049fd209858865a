"""KIVI's device functions: `x = code * scale + zero`, grouped along tokens or channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_width, padded_words, words_per_token
from kvcache_compress.triton_kernels.common import lookup
from kvcache_compress.triton_kernels.common.codes import load_codes, tile_channels, tile_width
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order

if TYPE_CHECKING:
    from kvcache_compress.methods.kivi import KIVICodec


class Grouped(NamedTuple):
    """Bits of a code, words of a token, the same padded (`codes.py`), tokens and channels that share a scale.

    fits: True if `lookup.py` can unpack the codes.
    """

    bits: int
    words: int
    padded: int
    tokens: int
    channels: int
    fits: bool


@triton.constexpr_function
def divides(part, total):
    return total % part == 0


@triton.jit
def middle(b_scale, b_zero, BITS: tl.constexpr):
    """Decoded value of the middle of the code range, in float16."""
    return lookup.scaled(b_scale, tl.full(b_scale.shape, (2**BITS - 1) / 2, tl.float16), b_zero)


@triton.jit
def per_unit(b_scale, BITS: tl.constexpr):
    """Scale of the levels that `lookup.levels` returns, in float16."""
    if lookup.unit(BITS) == 1:
        b_step = b_scale
    else:
        b_step = lookup.product(b_scale, tl.full(b_scale.shape, 1 / lookup.unit(BITS), tl.float16))
    return b_step


@triton.jit
def half_of_word(p_halves, o_row, o_t, m_t, COUNT: tl.constexpr, AT: tl.constexpr):
    """Number `AT` of the `COUNT` that each token has, `[T]`, out of words of 32 bits (see `codes.load_scales`)."""
    p_twos = p_halves.to(tl.pointer_type(tl.int32), bitcast=True)
    b_twos = tl.load(p_twos + o_row * (COUNT // 2) + (o_t * (COUNT // 2) + AT // 2), mask=m_t, other=0)
    return (b_twos >> 16 * (AT % 2)).to(tl.int16).to(p_halves.dtype.element_ty, bitcast=True)


@triton.jit
def decoded(fields, words, o_row, o_t, m_t, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Tiles of decoded tokens (see `codes.py`)."""
    BITS: tl.constexpr = META.bits
    WORDS: tl.constexpr = META.words
    PADDED: tl.constexpr = META.padded
    TOKENS: tl.constexpr = META.tokens
    CHANNELS: tl.constexpr = META.channels
    FITS: tl.constexpr = META.fits
    SCALE: tl.constexpr = 1 if (BITS == 1 or BITS == 2 or BITS == 4) else 2
    SPAN: tl.constexpr = WORDS * tile_width(PADDED) // PADDED
    if FAST and FITS and BITS == 2:
        b_codes = lookup.two_bit_codes(fields[0], words, o_row, o_t, m_t, WORDS, PADDED)
    elif FAST and FITS:
        b_codes = lookup.levels(
            fields[0], fields[SCALE - 1], words, o_row, o_t, m_t, 0, BITS, True, WORDS, PADDED, WORDS
        )
    else:
        b_codes = load_codes(fields[0], fields[SCALE - 1], o_row, o_t, m_t, BITS, WORDS, PADDED, WORDS)
    GROUPS: tl.constexpr = 8 * WORDS // CHANNELS
    b_tiles = ()
    for i in tl.static_range(len(b_codes)):
        o_d, m_d = tile_channels(i, WORDS, PADDED)
        if divides(o_t.shape[0], TOKENS):
            o_g = (o_row // TOKENS + tl.zeros([1], tl.int32))[:, None] * GROUPS
            m_s = (tl.full([1], True, tl.int1))[:, None]
        else:
            o_g = ((o_row + o_t) // TOKENS)[:, None] * GROUPS
            m_s = m_t[:, None]
        if divides(SPAN, CHANNELS):
            o_s = o_g + i * SPAN // CHANNELS
        else:
            o_s = o_g + (o_d // CHANNELS)[None, :]
            if PADDED != WORDS:
                m_s = m_s & m_d[None, :]
        if TOKENS == 1 and divides(SPAN, CHANNELS) and GROUPS % 2 == 0:
            b_scale = half_of_word(fields[SCALE], o_row, o_t, m_t, GROUPS, i * SPAN // CHANNELS)[:, None]
            b_zero = half_of_word(fields[SCALE + 1], o_row, o_t, m_t, GROUPS, i * SPAN // CHANNELS)[:, None]
        else:
            b_scale = tl.load(fields[SCALE] + o_s, mask=m_s, other=0.0)
            b_zero = tl.load(fields[SCALE + 1] + o_s, mask=m_s, other=0.0)
        if FAST and FITS and BITS == 2:
            b_tile = lookup.scaled(b_codes[i], b_scale, b_zero)
        elif FAST and FITS:
            b_tile = lookup.scaled(b_codes[i], per_unit(b_scale, BITS), middle(b_scale, b_zero, BITS))
        else:
            b_tile = (b_codes[i].to(tl.float32) * b_scale.to(tl.float32) + b_zero.to(tl.float32)).to(DTYPE)
        b_tiles = b_tiles + (b_tile,)
    return b_tiles


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s = q · (code * scale + zero)"""
    b_k = decoded(fields, words, o_row, o_t, m_t, META, b_q[0].dtype, FAST)
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(b_k)):
        b_s = tl.dot(b_k[i], b_q[i], b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc += p (code * scale + zero)"""
    b_v = decoded(fields, words, o_row, o_t, m_t, META, DTYPE, FAST)
    b_sums = ()
    for i in tl.static_range(len(b_v)):
        b_sums = b_sums + (tl.dot(tl.trans(b_v[i]), b_p.to(DTYPE), b_acc[i], input_precision=PRECISION),)
    return b_sums


def kivi_side(codec: KIVICodec) -> KernelSide:
    """Kernel operands of a KIVI codec: code space is the head's space, padded."""
    width, group = codec.context.head_dim, codec.options.group_size
    keys, bits = codec.context.side == "keys", codec.options.bits
    tokens, channels = (group, 1) if keys else (1, group)
    fits = lookup.fits(width, bits)
    meta = Grouped(bits, words_per_token(width), padded_words(width), tokens, channels, fits)
    side = KernelSide(score, accumulate, meta, code_tiles(width))
    if fits:
        side.words, side.places = lookup.even_words(bits, width, codec.context.device)
        side.warps = lookup.warps(width)
    if padded_width(width) != width:
        identity = torch.eye(width, device=codec.context.device).unsqueeze(0)
        side.output_map = in_code_order(identity, (width,)).contiguous()
        side.query_map = side.output_map.mT.contiguous()
    return side
