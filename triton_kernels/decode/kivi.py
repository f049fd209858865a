"""KIVI's device functions: `x = code * scale + zero`, grouped along tokens or channels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.layout import padded_width
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.common.codes import (
    Codes,
    codes_of,
    divides,
    load_codes,
    planes,
    tile_channels,
    tile_width,
)
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order


class Grouped(NamedTuple):
    """Codes of a token, and the tokens and channels that share a scale.

    fits: True if `lookup.py` can unpack the codes; folded: True if scales are multiplied with queries or weights
    instead of codes, which stay in place (`in_place.placed`) in the fast path.
    """

    codes: Codes
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
def place_factors(i: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Factors of tile `i`'s channels that undo the places of their codes: `[channels]`."""
    WIDTH: tl.constexpr = tile_width(CODES.padded)
    if CODES.padded == WIDTH:
        b_factor = tl.full([WIDTH], 2.0 ** -in_place.place(i, CODES.bits), DTYPE)
    else:
        o_field = i * (WIDTH // CODES.padded) + tl.arange(0, WIDTH) // CODES.padded
        b_factor = (1.0 / (1 << CODES.bits * (o_field % (10 // CODES.bits))).to(tl.float32)).to(DTYPE)
    return b_factor


@triton.jit
def middle(b_scale, b_zero, BITS: tl.constexpr):
    """Decoded value of the middle of the code range, in float16."""
    return assembly.scaled(b_scale, tl.full(b_scale.shape, (2**BITS - 1) / 2, tl.float16), b_zero)


@triton.jit
def half_of_word(p_halves, tile, COUNT: tl.constexpr, AT: tl.constexpr):
    """Number `AT` of a token's `COUNT`, `[T]`, out of its words of 64 or 32 bits (see `codes.load_scales`)."""
    EACH: tl.constexpr = 4 if COUNT % 4 == 0 else 2
    p_words = p_halves.to(tl.pointer_type(tl.int64 if EACH == 4 else tl.int32), bitcast=True)
    p_words += tile.o_row * (COUNT // EACH) + AT // EACH
    b_words = tl.load(p_words + tile.o_t * (COUNT // EACH), mask=tile.m_t, other=0)
    return (b_words >> 16 * (AT % EACH)).to(tl.int16).to(p_halves.dtype.element_ty, bitcast=True)


@triton.jit
def decoded(tile, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Tiles of decoded tokens (see `codes.py`)."""
    CODES: tl.constexpr = META.codes
    BITS: tl.constexpr = CODES.bits
    CHANNELS: tl.constexpr = META.channels
    LOOKED_UP: tl.constexpr = FAST and META.fits and BITS > 1
    SPAN: tl.constexpr = CODES.words * tile_width(CODES.padded) // CODES.padded
    GROUPS: tl.constexpr = 8 * CODES.words // CHANNELS
    p_scale, p_zero = tile.fields[planes(BITS)], tile.fields[planes(BITS) + 1]
    b_codes = lookup.levels(tile, tile.words, CODES, 0, True) if LOOKED_UP else load_codes(tile, CODES)
    b_tiles = ()
    for i in tl.static_range(len(b_codes)):
        o_d, m_d = tile_channels(i, CODES)
        if divides(tile.o_t.shape[0], META.tokens):
            o_g = (tile.o_row // META.tokens + tl.zeros([1], tl.int32))[:, None] * GROUPS
            m_s = (tl.full([1], True, tl.int1))[:, None]
        else:
            o_g = ((tile.o_row + tile.o_t) // META.tokens)[:, None] * GROUPS
            m_s = tile.m_t[:, None]
        if divides(SPAN, CHANNELS):
            o_s = o_g + i * SPAN // CHANNELS
        else:
            o_s = o_g + (o_d // CHANNELS)[None, :]
            if CODES.padded != CODES.words:
                m_s = m_s & m_d[None, :]
        if META.tokens == 1 and divides(SPAN, CHANNELS) and GROUPS % 2 == 0:
            b_scale = half_of_word(p_scale, tile, GROUPS, i * SPAN // CHANNELS)[:, None]
            b_zero = half_of_word(p_zero, tile, GROUPS, i * SPAN // CHANNELS)[:, None]
        else:
            b_scale = tl.load(p_scale + o_s, mask=m_s, other=0.0)
            b_zero = tl.load(p_zero + o_s, mask=m_s, other=0.0)
        if LOOKED_UP:
            b_step = b_scale
            if lookup.unit(BITS) != 1:
                b_step = assembly.product(b_scale, tl.full(b_scale.shape, 1 / lookup.unit(BITS), tl.float16))
            b_tile = assembly.scaled(b_codes[i], b_step, middle(b_scale, b_zero, BITS))
        else:
            b_tile = (b_codes[i].to(tl.float32) * b_scale.to(tl.float32) + b_zero.to(tl.float32)).to(DTYPE)
        b_tiles = b_tiles + (b_tile,)
    return b_tiles


@triton.jit
def numbers_of(b_twos, DTYPE: tl.constexpr):
    """The two 16-bit numbers of each word of 32 bits."""
    return b_twos.to(tl.int16).to(DTYPE, bitcast=True), (b_twos >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def channel_row(p_numbers, i: tl.constexpr, CODES: tl.constexpr):
    """Load the 16-bit numbers of tile `i`'s channels, `[1, channels]`, as words of 32 (see `codes.load_scales`)."""
    WIDTH: tl.constexpr = tile_width(CODES.padded)
    if CODES.words % 2 == 0:
        o_p = i * WIDTH + tl.arange(0, WIDTH // 2) * 2
        o_c = o_p % CODES.padded
        p_twos = p_numbers.to(tl.pointer_type(tl.int32), bitcast=True) + o_p // CODES.padded * (CODES.words // 2)
        if CODES.padded == CODES.words:
            b_twos = tl.load(p_twos + o_c // 2)
        else:
            b_twos = tl.load(p_twos + o_c // 2, mask=o_c < CODES.words, other=0)
        b_first, b_second = numbers_of(b_twos[None, :], p_numbers.dtype.element_ty)
        b_row = tl.reshape(tl.join(b_first, b_second), [1, WIDTH])
    else:
        o_d, m_d = tile_channels(i, CODES)
        b_row = tl.load(p_numbers + o_d[None, :], mask=m_d[None, :], other=0.0)
    return b_row


@triton.jit
def codes_in_place(tile, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr):
    """Tiles of codes in place (see `in_place.placed`), as multiples of `in_place.UNIT` if they are numbers of DTYPE."""
    CODES: tl.constexpr = META.codes
    return in_place.placed(tile, CODES, VALUES) if FAST and META.fits else in_place.placed_codes(tile, CODES, DTYPE)


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s = q · (code * scale + zero); where a tile of tokens lies in one group, Σ (q scale) code + q · zero"""
    CODES: tl.constexpr = META.codes
    DTYPE: tl.constexpr = b_q[0].dtype
    BLOCK: tl.constexpr = tile.o_t.shape[0]
    b_s = tl.zeros([BLOCK, b_q[0].shape[1]], tl.float32)
    # Float32 products use no tensor cores: those with zero points would cost as much as the others.
    if META.folded and divides(BLOCK, META.tokens) and b_q[0].dtype != tl.float32:
        b_codes = codes_in_place(tile, META, DTYPE, FAST, False)
        b_zeros = tl.zeros_like(b_s)
        o_group = tile.o_row // META.tokens * (8 * CODES.words)
        for i in tl.static_range(len(b_codes)):
            b_scale = channel_row(tile.fields[1] + o_group, i, CODES).to(DTYPE)
            b_zero = channel_row(tile.fields[2] + o_group, i, CODES).to(DTYPE)
            b_query = b_q[i] * place_factors(i, CODES, DTYPE)[:, None] * tl.trans(b_scale)
            b_s = tl.dot(b_codes[i], b_query, b_s, input_precision="ieee")
            b_zero = tl.broadcast_to(b_zero, [BLOCK, b_zero.shape[1]])
            b_zeros = tl.dot(b_zero, b_q[i], b_zeros, input_precision="ieee")
        if FAST and META.fits:
            b_s *= 1 / in_place.UNIT
        b_s += b_zeros
    else:
        b_k = decoded(tile, META, DTYPE, FAST)
        for i in tl.static_range(len(b_k)):
            b_s = tl.dot(b_k[i], b_q[i], b_s, input_precision="ieee")
    return b_s


@triton.jit
def accumulate(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """acc += p (code * scale + zero); if folded, acc += (p scale) code and, for each group, a sum of p zero"""
    CODES: tl.constexpr = META.codes
    b_sums = ()
    if META.folded:
        GROUPS: tl.constexpr = 8 * CODES.words // META.channels
        TILES: tl.constexpr = len(b_acc) - 1
        b_codes = codes_in_place(tile, META, DTYPE, FAST, True)
        b_p = (b_p * weight_unit(CODES.bits)).to(DTYPE)
        p_zeros = tile.fields[2]
        p_twos = p_zeros.to(tl.pointer_type(tl.int32), bitcast=True) + tile.o_row * (GROUPS // 2)
        o_w = tile.o_t[:, None] * (GROUPS // 2) + (tl.arange(0, 8) % (GROUPS // 2))[None, :]
        b_twos = tl.load(p_twos + o_w, mask=tile.m_t[:, None], other=0)
        b_zeros = assembly.joined(numbers_of(b_twos, p_zeros.dtype.element_ty))[0].to(DTYPE)
        b_zero_sum = tl.dot(tl.trans(b_zeros), b_p, b_acc[TILES], input_precision="ieee")
        for i in tl.static_range(TILES):
            if i * GROUPS % TILES == 0:
                b_scale = half_of_word(tile.fields[1], tile, GROUPS, i * GROUPS // TILES).to(DTYPE)
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
        b_v = decoded(tile, META, DTYPE, FAST)
        for i in tl.static_range(len(b_v)):
            b_sums = b_sums + (tl.dot(tl.trans(b_v[i]), b_p.to(DTYPE), b_acc[i], input_precision="ieee"),)
    return b_sums


def kivi_side(context: CodecContext, bits: int, group: int) -> KernelSide:
    """Kernel operands of codes of `bits` bits, of which `group` tokens (keys) or channels (values) share a scale.

    Code space is the head's space, padded, and with folded values sums by group.
    """
    width, device, keys = context.head_dim, context.device, context.side == "keys"
    tokens, channels = (group, 1) if keys else (1, group)
    fits, codes, tiles = lookup.fits(width, bits), codes_of(bits, width, 0), code_tiles(width)
    groups, whole = width // group, codes.words == codes.padded
    folded = bits in (1, 2, 4) and (keys or (whole and groups % 2 == 0 and len(tiles) % groups == 0))
    meta = Grouped(codes, tokens, channels, fits, folded)
    side = KernelSide(score if keys else accumulate, meta, tiles)
    if fits:
        side.warps, side.places = assembly.warps(width), lookup.places_needed(width, bits)
        words = torch.cat([lookup.even_table(bits), assembly.places(side.places)])
        side.words = words.to(device) if len(words) else None
    identity = in_code_order(torch.eye(width, device=device).unsqueeze(0), (width,))
    if folded and not keys:
        side.widths = (*tiles, 16)
        rows = in_place.places_undone(identity, bits) / in_place.UNIT.value
        group = torch.arange(width, device=device) * groups // width
        column = group // 2 + group % 2 * 8  # sums of zero points, even groups first
        zeros = (torch.arange(16, device=device)[:, None] == column).to(rows)[None]
        side.matrix = torch.cat([rows, zeros], 1) / weight_unit(bits)
    elif padded_width(width) != width:
        side.matrix = (identity.mT if keys else identity).contiguous()
    return side
