"""KIVI's device functions: `x = code * scale + zero`, grouped along tokens or channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.layout import padded_width, padded_words, words_per_token
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.common.codes import divides, load_codes, tile_channels, tile_width
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order


class Grouped(NamedTuple):
    """Bits of a code, words of a token, padded words (`codes.py`), tokens and channels that share a scale.

    fits: True if `lookup.py` can unpack the codes; folded: True if scales are multiplied with queries or weights
    instead of codes, which stay in place (`in_place.placed`) in the fast path.
    """

    bits: int
    words: int
    padded: int
    tokens: int
    channels: int
    fits: bool
    folded: bool


@triton.constexpr_function
def weight_unit(bits):
    """Factor of weights that are multiplied with scales of values, so that fewer leave float16's normal numbers.

    A weight is at most 1, and a scale at most `2 √½ LONGEST / (2^bits - 1)` or `LONGEST`: none gets too large.
    """
    return 2.0 ** (bits - 1)


@triton.jit
def place_factors(i: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr):
    """Factors of tile `i`'s channels that undo the places of their codes: `[channels]`."""
    WIDTH: tl.constexpr = tile_width(META.padded)
    if META.padded == WIDTH:
        b_factor = tl.full([WIDTH], 2.0 ** -in_place.place(i, META.bits), DTYPE)
    else:
        o_field = i * (WIDTH // META.padded) + tl.arange(0, WIDTH) // META.padded
        b_factor = (1.0 / (1 << META.bits * (o_field % (10 // META.bits))).to(tl.float32)).to(DTYPE)
    return b_factor


@triton.jit
def middle(b_scale, b_zero, BITS: tl.constexpr):
    """Decoded value of the middle of the code range, in float16."""
    return assembly.scaled(b_scale, tl.full(b_scale.shape, (2**BITS - 1) / 2, tl.float16), b_zero)


@triton.jit
def per_unit(b_scale, BITS: tl.constexpr):
    """Scale of the levels that `lookup.levels` returns, in float16."""
    if lookup.unit(BITS) == 1:
        b_step = b_scale
    else:
        b_step = assembly.product(b_scale, tl.full(b_scale.shape, 1 / lookup.unit(BITS), tl.float16))
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
    LOOKED_UP: tl.constexpr = FAST and META.fits and BITS > 1
    SCALE: tl.constexpr = 1 if (BITS == 1 or BITS == 2 or BITS == 4) else 2
    SPAN: tl.constexpr = WORDS * tile_width(PADDED) // PADDED
    if LOOKED_UP:
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
        if LOOKED_UP:
            b_tile = assembly.scaled(b_codes[i], per_unit(b_scale, BITS), middle(b_scale, b_zero, BITS))
        else:
            b_tile = (b_codes[i].to(tl.float32) * b_scale.to(tl.float32) + b_zero.to(tl.float32)).to(DTYPE)
        b_tiles = b_tiles + (b_tile,)
    return b_tiles


@triton.jit
def numbers_of(b_twos, DTYPE: tl.constexpr):
    """The two 16-bit numbers of each word of 32 bits."""
    return b_twos.to(tl.int16).to(DTYPE, bitcast=True), (b_twos >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def channel_row(p_numbers, i: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Load the 16-bit numbers of tile `i`'s channels, `[1, channels]`, as words of 32 (see `codes.load_scales`)."""
    WIDTH: tl.constexpr = tile_width(PADDED)
    if WORDS % 2 == 0:
        o_p = i * WIDTH + tl.arange(0, WIDTH // 2) * 2
        p_twos = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True) + o_p // PADDED * (WORDS // 2)
        if PADDED == WORDS:
            b_twos = tl.load(p_twos + o_p % PADDED // 2)
        else:
            b_twos = tl.load(p_twos + o_p % PADDED // 2, mask=o_p % PADDED < WORDS, other=0)
        b_first, b_second = numbers_of(b_twos[None, :], p_numbers.dtype.element_ty)
        b_row = tl.reshape(tl.join(b_first, b_second), [1, WIDTH])
    else:
        o_d, m_d = tile_channels(i, WORDS, PADDED)
        b_row = tl.load(p_numbers + o_d[None, :], mask=m_d[None, :], other=0.0)
    return b_row


@triton.jit
def codes_in_place(
    fields, words, o_row, o_t, m_t, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr
):
    """Tiles of codes in place (see `in_place.placed`), as multiples of `in_place.UNIT` if they are numbers of DTYPE."""
    if FAST and META.fits:
        b_codes = in_place.placed(
            fields[0], words, o_row, o_t, m_t, META.bits, META.words, META.padded, META.words, VALUES
        )
    else:
        b_codes = load_codes(fields[0], fields[0], o_row, o_t, m_t, META.bits, META.words, META.padded, META.words)
        b_codes = in_place.placed_codes(b_codes, META.padded, META.bits, DTYPE)
    return b_codes


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s = q · (code * scale + zero); where a tile of tokens lies in one group, Σ (q scale) code + q · zero"""
    DTYPE: tl.constexpr = b_q[0].dtype
    BLOCK: tl.constexpr = o_t.shape[0]
    b_s = tl.zeros([BLOCK, b_q[0].shape[1]], tl.float32)
    # Float32 products use no tensor cores: those with zero points would cost as much as the others.
    if META.folded and divides(BLOCK, META.tokens) and b_q[0].dtype != tl.float32:
        b_codes = codes_in_place(fields, words, o_row, o_t, m_t, META, DTYPE, FAST, False)
        b_zeros = tl.zeros_like(b_s)
        o_group = o_row // META.tokens * (8 * META.words)
        for i in tl.static_range(len(b_codes)):
            b_scale = channel_row(fields[1] + o_group, i, META.words, META.padded).to(DTYPE)
            b_zero = channel_row(fields[2] + o_group, i, META.words, META.padded).to(DTYPE)
            b_query = b_q[i] * place_factors(i, META, DTYPE)[:, None] * tl.trans(b_scale)
            b_s = tl.dot(b_codes[i], b_query, b_s, input_precision="ieee")
            b_zero = tl.broadcast_to(b_zero, [BLOCK, b_zero.shape[1]])
            b_zeros = tl.dot(b_zero, b_q[i], b_zeros, input_precision="ieee")
        if FAST and META.fits:
            b_s *= 1 / in_place.UNIT
        b_s += b_zeros
    else:
        b_k = decoded(fields, words, o_row, o_t, m_t, META, DTYPE, FAST)
        for i in tl.static_range(len(b_k)):
            b_s = tl.dot(b_k[i], b_q[i], b_s, input_precision="ieee")
    return b_s


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc += p (code * scale + zero); if folded, acc += (p scale) code and, for each group, a sum of p zero"""
    b_sums = ()
    if META.folded:
        GROUPS: tl.constexpr = 8 * META.words // META.channels
        TILES: tl.constexpr = len(b_acc) - 1
        b_codes = codes_in_place(fields, words, o_row, o_t, m_t, META, DTYPE, FAST, True)
        b_p = (b_p * weight_unit(META.bits)).to(DTYPE)
        p_twos = fields[2].to(tl.pointer_type(tl.int32), bitcast=True) + o_row * (GROUPS // 2)
        o_w = tl.arange(0, 8) % (GROUPS // 2)
        b_twos = tl.load(p_twos + (o_t[:, None] * (GROUPS // 2) + o_w[None, :]), mask=m_t[:, None], other=0)
        b_zeros = assembly.joined(numbers_of(b_twos, fields[2].dtype.element_ty))[0].to(DTYPE)
        b_zero_sum = tl.dot(tl.trans(b_zeros), b_p, b_acc[TILES], input_precision="ieee")
        for i in tl.static_range(TILES):
            if i * GROUPS % TILES == 0:
                b_scale = half_of_word(fields[1], o_row, o_t, m_t, GROUPS, i * GROUPS // TILES).to(DTYPE)
                b_weights = assembly.product(b_p, b_scale[:, None]) if FAST else b_p * b_scale[:, None]
            b_tile = tl.trans(b_codes[i])
            if FAST and META.fits:
                b_sum = tl.dot(b_tile, b_weights, b_acc[i], input_precision="ieee")
            elif b_weights.dtype == tl.float32:
                b_sum = tl.dot(b_tile, b_weights * in_place.UNIT, b_acc[i], input_precision="ieee")
            else:
                b_sum = b_acc[i] + in_place.UNIT * tl.dot(b_tile, b_weights, input_precision="ieee")
            b_sums = b_sums + (b_sum,)
        b_sums = b_sums + (b_zero_sum,)
    else:
        b_v = decoded(fields, words, o_row, o_t, m_t, META, DTYPE, FAST)
        for i in tl.static_range(len(b_v)):
            b_sums = b_sums + (tl.dot(tl.trans(b_v[i]), b_p.to(DTYPE), b_acc[i], input_precision="ieee"),)
    return b_sums


def kivi_side(context: CodecContext, bits: int, group: int) -> KernelSide:
    """Kernel operands of codes of `bits` bits, of which `group` tokens (keys) or channels (values) share a scale.

    Code space is the head's space, padded, and with folded values sums by group.
    """
    width, device, keys = context.head_dim, context.device, context.side == "keys"
    tokens, channels = (group, 1) if keys else (1, group)
    fits, words, padded = lookup.fits(width, bits), words_per_token(width), padded_words(width)
    tiles = code_tiles(width)
    groups = width // group
    folded = bits in (1, 2, 4) and (keys or (words == padded and groups % 2 == 0 and len(tiles) % groups == 0))
    meta = Grouped(bits, words, padded, tokens, channels, fits, folded)
    side = KernelSide(score if keys else accumulate, meta, tiles)
    if fits:
        side.words, side.places = lookup.even_words(bits, width, device)
        side.warps = assembly.warps(width)
    identity = in_code_order(torch.eye(width, device=device).unsqueeze(0), (width,))
    if folded and not keys:
        side.widths = (*tiles, 16)
        rows = in_place.places_undone(identity, bits) / in_place.UNIT.value
        side.matrix = torch.cat([rows, _zeros_of_groups(identity, groups)], 1) / weight_unit(bits)
    elif padded_width(width) != width:
        side.matrix = (identity.mT if keys else identity).contiguous()
    return side


def _zeros_of_groups(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Rows `[1, 16, D]` of a map from the sums of zero points, even groups first."""
    group = torch.arange(rows.shape[2], device=rows.device) * groups // rows.shape[2]
    column = group // 2 + group % 2 * 8
    return (torch.arange(16, device=rows.device)[:, None] == column).to(rows)[None]
