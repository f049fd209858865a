"""Spectral's device functions: queries are turned to each group's anchor and mapped there, then scored by digits.

For a token at place b of group g, with the rotation R_g of the group's first token, basis A, levels L and the mean of
each place as `places[b] means`:

    turn:   q_g = R_gᵀ q,  mapped to (A q_g, means q_g)
    score:  s[t] = scale[t] Σ_w (A q_g)_w L[digit_w[t]] + places[b] · (means q_g)

Queries come as real and imaginary parts of the model's pairs of channels, 16 pairs to a tile. The table of channels and
means is stored as the tensor cores' operands need it (`_as_operands`); weights of digits are factors of what is mapped,
so that the table is exact in float16. The portable path turns, maps and scores in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kvcache_compress.codecs.layout import words_per_token
from kvcache_compress.triton_kernels.common import lookup
from kvcache_compress.triton_kernels.common.codes import load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide

if TYPE_CHECKING:
    from kvcache_compress.methods.spectral.codec import SpectralCodec

TILE = tl.constexpr(16)
"""Columns of a tile: the depth of the tensor cores' operands."""
WIDEST = 2.0**12
"""Largest magnitude of a mapped query before it is turned, of queries up to 1: far below what float16 can hold."""
HIGHEST = 2.0**14
"""Largest entry of the table of places."""
MAP, PLACES, LEVELS, FACTORS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Indices of the tables."""
UNIT = tl.constexpr(2.0**-24)
"""Unit of the scores: that of float16's smallest numbers, which bits in place are to the fast path."""
SMALL = tl.constexpr(2.0**-12)
"""Factor of the levels of two bits in the fast path, of mapped means and of the table of places."""


class Digits(NamedTuple):
    """Constants of the digits, in parts of at most 16 words per token.

    bits, words, at, count, padded: by part, bits of a digit, words of a token in its plane, first word and number of
        words of the part, and the same padded (`codes.py`).
    field, fast, tile: by part, the plane's field, the place of the part's `lookup.places` in the words or -1 if
        `lookup.py` cannot unpack it, and its first tile.
    scale: field of the scales; tables: words that hold the table of digits of two bits; ones: first tile of one bit.
    group, rotary: tokens per group, and pairs of channels that RoPE rotates.
    columns: of the map.
    """

    bits: tuple[int, ...]
    words: tuple[int, ...]
    at: tuple[int, ...]
    count: tuple[int, ...]
    padded: tuple[int, ...]
    field: tuple[int, ...]
    fast: tuple[int, ...]
    tile: tuple[int, ...]
    scale: int
    tables: int
    ones: int
    group: int
    rotary: int
    columns: int


TURN = lookup.text(
    "mul.rn.f16x2 r0, $3, $5",
    "fma.rn.f16x2 $0, $2, $4, r0",
    "mul.rn.f16x2 r0, $2, $5",
    "neg.f16x2 r0, r0",
    "fma.rn.f16x2 $1, $3, $4, r0",
)
TURN_REGISTERS = lookup.registers(2, 4)
BIT = lookup.text(
    "prmt.b32 r0, $8, 0, $10",  # bytes A and B of a word of four, as halves
    *(f"and.b32 ${j}, r0, {0x00010001 << j:#x}" for j in range(8)),
)
BIT_REGISTERS = lookup.registers(8, 4)


@triton.jit
def query_operand(b_x):
    """Order `b_x` `[M / 8, 8, 4, 4]`, rows by pairs of channels, as the tensor cores hold it: `[TILE, M]`."""
    M: tl.constexpr = b_x.shape[0] * 8
    b_x = tl.reshape(b_x, [M // 8, 8, 4, 2, 2])
    return tl.trans(tl.reshape(tl.permute(b_x, [0, 1, 3, 2, 4]), [M, TILE]))


@triton.jit
def turned(
    p_q, p_rope, o_r, m_r, o_g, TILES: tl.constexpr, ROTARY: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
):
    """Load queries `o_r` `[M / 8, 8]`, turned back by the rotations of groups `o_g`: real and imaginary tiles."""
    o_p = (tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :])[None, None, :, :]
    p_q += o_r[:, :, None, None] * (2 * TILES * TILE) + o_p
    p_rope += o_g[:, :, None, None] * (2 * ROTARY) + o_p
    b_tiles = ()
    for i in tl.static_range(TILES):
        b_x = tl.load(p_q + 2 * i * TILE, mask=m_r[:, :, None, None], other=0.0)
        b_y = tl.load(p_q + (2 * i + 1) * TILE, mask=m_r[:, :, None, None], other=0.0)
        if TILE * i < ROTARY:
            p_cos = p_rope + i * TILE
            if TILE * (i + 1) <= ROTARY:
                b_cos, b_sin = tl.load(p_cos), tl.load(p_cos + ROTARY)
            else:
                m_p = i * TILE + o_p < ROTARY
                b_cos, b_sin = tl.load(p_cos, mask=m_p, other=1.0), tl.load(p_cos + ROTARY, mask=m_p, other=0.0)
            if FAST:
                b_x, b_y = tl.inline_asm_elementwise(
                    TURN, TURN_REGISTERS, [b_x, b_y, b_cos, b_sin],
                    dtype=(tl.float16,) * 2, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                b_cos, b_sin = b_cos.to(tl.float32), b_sin.to(tl.float32)
                b_a, b_b = b_x.to(tl.float32), b_y.to(tl.float32)
                b_x, b_y = b_a * b_cos + b_b * b_sin, b_b * b_cos - b_a * b_sin
        b_tiles = b_tiles + (query_operand(b_x.to(DTYPE)), query_operand(b_y.to(DTYPE)))
    return b_tiles


@triton.jit
def map_tiles(p_map, zero):
    """Load a block of the map: from two tiles of the query to one of columns, both `[columns, pairs of channels]`.

    A lane loads what it holds as an operand of the tensor cores, so no number moves between threads.
    """
    o_lane, o_e = zero + tl.arange(0, 32)[None, :, None], tl.arange(0, 8)[None, None, :]
    b_map = tl.load(p_map + (tl.arange(0, 2)[:, None, None] * 256 + o_lane * 8 + o_e))
    b_map = tl.permute(tl.reshape(b_map, [2, 8, 4, 2, 2, 2]), [0, 1, 4, 2, 5, 3])
    return tl.split(tl.reshape(b_map, [TILE, TILE, 2]))


@triton.jit
def turn(
    p_q, tables, p_rope, i_h, o_r, m_r, o_g, zero,
    WIDTH: tl.constexpr, META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Map queries, turned to the anchors of their groups: tiles of code space, one of the means, and a constant `[M]`.

    In the fast path a digit of one bit is 0 or 1, and the constant makes it ±0.5.
    """
    PAIRS: tl.constexpr = WIDTH // (2 * TILE)
    COLUMNS: tl.constexpr = META.columns
    EXACT: tl.constexpr = DTYPE if FAST else tl.float32
    b_q = turned(p_q, p_rope, o_r, m_r, o_g, PAIRS, META.rotary, EXACT, FAST)
    p_map = tables[MAP] + i_h * (COLUMNS * WIDTH)
    p_factors = tables[FACTORS].to(tl.pointer_type(tl.float32), bitcast=True)
    p_factors += i_h * (3 * COLUMNS) + zero + tl.arange(0, TILE)
    b_mapped = ()
    b_zero = tl.zeros([TILE, b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(COLUMNS // TILE):
        b_tile = tl.zeros([TILE, b_q[0].shape[1]], tl.float32)
        for j in tl.static_range(PAIRS):
            b_x, b_y = map_tiles(p_map + (i * PAIRS + j) * (2 * TILE * TILE), zero)
            b_tile = tl.dot(b_x.to(EXACT), b_q[2 * j], b_tile, input_precision=PRECISION)
            b_tile = tl.dot(b_y.to(EXACT), b_q[2 * j + 1], b_tile, input_precision=PRECISION)
        b_tile *= tl.load(p_factors + (COLUMNS if FAST else 0) + i * TILE)[:, None]
        if FAST and i >= META.ones and (i + 1) * TILE < COLUMNS:
            b_zero += b_tile * tl.load(p_factors + 2 * COLUMNS + i * TILE)[:, None]
        b_mapped = b_mapped + (b_tile.to(EXACT),)
        if i % 2 == 1:
            tl.debug_barrier()
    return b_mapped + (tl.sum(b_zero, 0),)


@triton.jit
def part_levels(
    fields, tables, words, o_row, o_t, m_t,
    META: tl.constexpr, PART: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Tiles of the levels of a part's digits: those of one bit are ±0.5.

    FAST: in units of `SMALL`, and those of one bit in place, 0 or 2^field in units of `UNIT`.
    """
    BITS: tl.constexpr = META.bits[PART]
    WORDS: tl.constexpr = META.words[PART]
    COUNT: tl.constexpr = META.count[PART]
    PADDED: tl.constexpr = META.padded[PART]
    PLACE: tl.constexpr = META.fast[PART]
    AT: tl.constexpr = META.at[PART]
    FIELD: tl.constexpr = META.field[PART]
    TABLES: tl.constexpr = META.tables
    p_words = fields[FIELD] + AT
    if FAST and PLACE >= 0:
        if BITS == 1:
            b_fours = lookup.load_bytes(p_words, o_row, o_t, m_t, WORDS, PADDED, COUNT)
            b_levels = tl.inline_asm_elementwise(
                BIT, BIT_REGISTERS, [b_fours, words[PLACE]], dtype=(tl.float16,) * 8, is_pure=True, pack=2
            )
            if PADDED < TILE:
                b_levels = lookup.joined(b_levels)
        else:
            b_words = words[:TABLES] + (words[PLACE],)
            b_levels = lookup.levels(p_words, p_words, b_words, o_row, o_t, m_t, 0, BITS, False, WORDS, PADDED, COUNT)
    else:
        b_levels = ()
        b_codes = load_codes(p_words, p_words, o_row, o_t, m_t, BITS, WORDS, PADDED, COUNT)
        for i in tl.static_range(len(b_codes)):
            if BITS == 2:
                b_tile = tl.load(tables[LEVELS] + b_codes[i]) * (SMALL if FAST else 1.0)
            elif FAST:
                o_field = i * (TILE // PADDED) + tl.arange(0, TILE) // PADDED
                b_tile = (b_codes[i] << o_field[None, :]).to(tl.int16).to(tl.float16, bitcast=True)
            else:
                b_tile = b_codes[i].to(DTYPE) - 0.5
            b_levels = b_levels + (b_tile.to(DTYPE),)
    return b_levels


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s[t] = scale[t] Σ_w (A q_g)_w L[digit_w[t]] + places[b] · (means q_g), in `UNIT`, of what `turn` returns."""
    GROUP: tl.constexpr = META.group
    SCALE: tl.constexpr = META.scale
    MEANS: tl.constexpr = len(b_q) - 2
    DTYPE: tl.constexpr = b_q[0].dtype
    b_scale = load_scales(fields[SCALE], o_row, o_t, m_t).to(tl.float32)
    if not FAST:
        b_scale *= UNIT
    o_place = (o_row % GROUP).to(tl.int32) + o_t
    p_places = tables[PLACES] + (i_h * GROUP + o_place)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    b_s = tl.broadcast_to(b_q[MEANS + 1][None, :], [o_t.shape[0], b_q[0].shape[1]])
    for i in tl.static_range(len(META.bits)):
        b_levels = part_levels(fields, tables, words, o_row, o_t, m_t, META, i, DTYPE, FAST)
        for j in tl.static_range(len(b_levels)):
            b_s = tl.dot(b_levels[j], b_q[META.tile[i] + j], b_s, input_precision=PRECISION)
    return tl.dot(tl.load(p_places).to(DTYPE), b_q[MEANS], b_s * b_scale[:, None], input_precision=PRECISION)


def spectral_side(codec: SpectralCodec) -> KernelSide:
    """Kernel operands of a spectral codec with statistics. Code space: real and imaginary parts of 16 pairs in turn."""
    digits, device, dim = codec.ready_digits(), codec.context.device, codec.context.head_dim
    chosen = digits.channels[..., None].expand(*digits.channels.shape, dim)
    directions = codec.directions.gather(1, chosen)
    of_parts, rows, factors = [], [], []
    first = digit = 0
    planes = [(bits, width) for bits, width in zip((2, 1), codec.counts, strict=True) if width]
    for field, (bits, width) in enumerate(planes):
        words, run = words_per_token(width), slice(digit, digit + width)
        by_word = directions[:, run].unflatten(1, (8, words))
        weights = digits.weights[:, run].unflatten(1, (8, words))
        exponents = torch.arange(8.0, device=device)[:, None]
        if bits == 2:
            kinds = weights, weights * (UNIT.value / SMALL.value), torch.zeros_like(weights)
        else:
            kinds = 2 * weights, weights * 2 ** (1 - exponents), (-(2.0 ** (exponents - 25))).expand_as(weights)
        for at in range(0, words, TILE.value):
            count = min(words - at, TILE.value)
            padded = 8 if count <= 8 else 16
            of_parts.append((bits, words, at, count, padded, field, first))
            rows.append(functional.pad(by_word[:, :, at : at + count], (0, 0, 0, padded - count)).flatten(1, 2))
            by_part = torch.stack(kinds, 1)[..., at : at + count]
            factors.append(functional.pad(by_part, (0, padded - count)).flatten(2, 3))
            first += 8 * padded // TILE.value
        digit += width
    fast = [_fits(*part[:5]) for part in of_parts]
    sizes = sorted({part[4] for part, fits in zip(of_parts, fast, strict=True) if fits}, reverse=True)
    tables = [lookup.byte_table(SMALL.value * codec.digit_levels[0].cpu(), 2)] if codec.counts.twos else []
    ahead = sum(map(len, tables))
    places_of = tuple(ahead + sizes.index(part[4]) if fits else -1 for part, fits in zip(of_parts, fast, strict=True))
    bits_of, words_of, at_of, count_of, padded_of, field_of, tile_of = zip(*of_parts, strict=True)
    unit, means, places = _scaled(codec.directions, codec.means, codec.places)
    factors.append(torch.full((len(means), 3, means.shape[1]), SMALL.value, device=device))
    rope, half = codec.context.rope, dim // 2
    order = torch.tensor(rope.order if rope else range(dim), device=device).view(2, half)
    spread = functional.pad(torch.eye(dim, device=device)[order], (0, 0, 0, -half % TILE.value))
    spread = spread.unflatten(1, (-1, TILE.value)).transpose(0, 1).flatten(0, 2)
    matrix = torch.cat([*(part / unit for part in rows), means], 1)
    meta = Digits(
        bits_of, words_of, at_of, count_of, padded_of, field_of, places_of, tile_of, scale=len(planes), tables=ahead,
        ones=tile_of[bits_of.index(1)], group=codec.group, rotary=rope.rotary if rope else 0, columns=matrix.shape[1],
    )  # fmt: skip
    return KernelSide(
        score,
        None,
        meta,
        (TILE.value,) * (len(spread) // TILE.value),
        tables=(
            _as_operands(matrix @ spread.mT),
            places,
            codec.digit_levels[0],
            torch.cat(factors, 2).contiguous().view(torch.int32),
        ),
        words=torch.cat([*tables, *map(_places, sizes)]).to(device) if sizes else None,
        places=sum(sizes),
        tokens=min(codec.group, 64 if dim <= 64 else 32),
        most_tokens=codec.group,
        warps=lookup.warps(dim),
        query_map=(unit / UNIT.value * spread.mT[None]).contiguous(),
        turn=turn,
        group=codec.group,
    )


def _places(words: int) -> torch.Tensor:
    """`lookup.places`, with selectors of bytes A and B as halves in the low half instead, int32 `[words]`."""
    first = torch.arange(words, dtype=torch.int32) % 4 // 2 * 2
    return lookup.places(words) & -0x10000 | first | 4 << 4 | first + 1 << 8 | 4 << 12


def _fits(bits: int, words: int, at: int, count: int, padded: int) -> bool:
    """True if `lookup.levels` can unpack a part: it reads some planes as words of 32 bits."""
    if bits == 2:
        return padded >= TILE.value or words % 2 == count % 2 == 0
    return words % 4 == count % 4 == 0


def _scaled(
    directions: torch.Tensor, means: torch.Tensor, places: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Unit of the scores, and the factors of the table of means, for scores in this unit: all fit float16."""
    length = float(means.abs().sum(-1).max().clamp_min(1e-30))
    unit = max(float(directions.abs().sum(-1).max()), float(places.abs().max()) * length / HIGHEST) / WIDEST
    unit = 2.0 ** math.ceil(math.log2(unit))  # as others would round the directions
    return unit, means * (WIDEST / length), places * (SMALL.value * length / WIDEST / unit)


def _as_operands(x: torch.Tensor) -> torch.Tensor:
    """Order a map `[H, columns, channels]` in blocks as `map_tiles` reads them.

    Of a block, 16 columns by two tiles of 16 channels, a lane gets its operands in loads of 16 bytes: of a column, two
    registers with two channels each, of both tiles.
    """
    x = x.unflatten(2, (-1, 2, 4, 2, 2)).unflatten(1, (-1, 2, 8))
    return x.permute(0, 1, 4, 2, 3, 6, 5, 7, 8).contiguous()
