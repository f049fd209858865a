"""Spectral's device functions: queries are rotated to each group's anchor, mapped, then scored against digits.

For a token at position b of group g, with the rotation R_g of the group's first token, basis A, levels L and the mean
at each position as `places[b] means`:

    rotate: q_g = R_gᵀ q,  mapped to (A q_g, means q_g)
    score:  s[t] = scale[t] Σ_w (A q_g)_w L[digit_w[t]] + places[b] · (means q_g)

`turn_kernel` does the first in a launch before attention, in place of `query.map_query_kernel`. Digit weights multiply
the mapped queries, so the table of directions and means stays exact in float16. The portable path rotates, maps and
scores in float32.
"""

import math
import re
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.layout import words_per_token
from kvcache_compress.codecs.quantizers.digits import DigitCodes
from kvcache_compress.triton_kernels.common import assembly, lookup
from kvcache_compress.triton_kernels.common.codes import Codes, load_codes, load_scales, low_plane
from kvcache_compress.triton_kernels.common.eras import era_part
from kvcache_compress.triton_kernels.common.operands import KernelSide, is_fast, launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import KernelCall

TILE = tl.constexpr(16)
"""Columns of a tile: the tensor cores' K dimension."""
PAIRS_AT_ONCE = 64
"""Pairs of group and query row per program of `turn_kernel`; half of them in float32, for its registers."""
CHUNK = tl.constexpr(32)
"""Columns of code space that it makes at a time."""
WIDEST = 2.0**12
"""Largest magnitude of a mapped query before rotation, of queries up to 1: far below what float16 can hold."""
HIGHEST = 2.0**14
"""Largest entry of the table of places."""
MAP, PLACES, LEVELS, FACTORS, ORDER = (tl.constexpr(table) for table in range(5))
"""Indices of the tables. `ORDER` has the channels of the real parts of the model's pairs, then those of the imaginary
ones."""
UNIT = tl.constexpr(2.0**-24)
"""Unit of the scores: that of float16's smallest numbers, which bits in place are to the fast path."""
SMALL = tl.constexpr(2.0**-12)
"""Factor of the levels of two bits in the fast path, of mapped means and of the table of places."""


class Part(NamedTuple):
    """Constants of a run of digits, of at most 16 words per token.

    places: place of its `assembly.places` in the words, or -1 if `lookup.py` cannot unpack it; tile: its first tile.
    """

    codes: Codes
    places: int
    tile: int


class Digits(NamedTuple):
    """Constants of the digits.

    scale: field of the scales; tables: words that hold the table of digits of two bits.
    group, rotary: tokens per group, and pairs of channels that RoPE rotates.
    columns: of the map; in_order: True if all real parts come first.
    """

    parts: tuple[Part, ...]
    scale: int
    tables: int
    group: int
    rotary: int
    columns: int
    in_order: bool


BIT = assembly.block(
    8,
    4,
    "lop3.b32 r1, 0x0000000f, $10, $11, 0xca",  # A's selector, then B's
    "prmt.b32 r0, $8, $9, r1",  # their bytes in halves, beside others that are masked
    *(f"and.b32 ${j}, r0, {0x00010001 << j:#x}" for j in range(8)),
)
STAGES = tl.constexpr(3 if tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) >= (3, 7, 1) else 1)
"""Stages of the loop over a map. Earlier releases show tensor cores of Hopper what was copied ahead without the fence
that they need (triton-lang/triton#10537)."""


@triton.jit(do_not_specialize=("n_packed", "k_capacity", "rope_capacity", "s_packed"))
def turn_kernel(
    p_q, p_rope, p_packed, p_order, p_map, p_factors, p_bound, p_mapped, p_rows, p_shift, n_packed, k_capacity,
    rope_capacity, s_packed, scaling, rows, DIM: tl.constexpr, HALF: tl.constexpr, META: tl.constexpr,
    M: tl.constexpr, BOUNDED: tl.constexpr, ERAS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Map a head's queries, rotated to its groups' anchors, `M` pairs of group and query row per program.

    p_mapped: `[B, H, groups, rows, columns]` in code space and the means' columns, each 16 in the order in which
    `query_tiles` reads them; p_rows: as of `map_query_kernel`, whose top is a power of two here; p_shift: float32
    `[B, H, groups, rows]`, in the fast path the constant that makes digits of one bit, which are 0 or 1 there, ±0.5.
    With `ERAS`, `p_packed` are eras, and a program's pairs lie in one.
    """
    COLUMNS: tl.constexpr = META.columns
    ROTARY: tl.constexpr = META.rotary
    GROUP: tl.constexpr = META.group
    DTYPE: tl.constexpr = p_mapped.dtype.element_ty
    i_h, i_b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_bh = i_b * tl.num_programs(1) + i_h
    if BOUNDED:
        n_packed = tl.minimum(n_packed, tl.load(p_packed + i_b * s_packed).to(tl.int32))
    n_pairs = n_packed // GROUP * rows
    start = tl.program_id(0) * M
    if ERAS:
        i_era, start, n_pairs = era_part(p_packed, tl.program_id(0), n_packed, M, rows, GROUP)
        i_h += i_era * tl.num_programs(1)
    if start >= n_pairs:
        return
    o_r, o_p, o_w = start + tl.arange(0, M), tl.arange(0, HALF), tl.arange(0, CHUNK)
    m_r = o_r < n_pairs
    o_near = tl.minimum(o_r, n_pairs - 1)
    p_q += ((i_bh * rows + o_near % rows) * DIM)[:, None]
    m_p = o_p < DIM // 2
    o_x, o_y = o_p, DIM // 2 + o_p
    if not META.in_order:
        o_x, o_y = tl.load(p_order + o_x, mask=m_p, other=0), tl.load(p_order + o_y, mask=m_p, other=0)
    b_x = tl.load(p_q + o_x[None, :], mask=m_p[None, :], other=0.0).to(tl.float32)
    b_y = tl.load(p_q + o_y[None, :], mask=m_p[None, :], other=0.0).to(tl.float32)
    b_top = tl.max(tl.maximum(tl.abs(b_x), tl.abs(b_y)), 1)
    b_power = tl.maximum(tl.ceil(tl.log2(tl.where(b_top > 0, b_top, 1.0))), -126.0)
    b_unit = tl.exp2(-b_power)[:, None]
    b_x, b_y = (b_x * b_unit).to(DTYPE), (b_y * b_unit).to(DTYPE)
    if ROTARY:
        p_cos = p_rope + ((i_b * rope_capacity + o_near // rows) * (2 * ROTARY))[:, None] + o_p[None, :]
        b_cos = tl.load(p_cos, mask=(o_p < ROTARY)[None, :], other=1.0).to(DTYPE)
        b_sin = tl.load(p_cos + ROTARY, mask=(o_p < ROTARY)[None, :], other=0.0).to(DTYPE)
        b_x, b_y = b_x * b_cos + b_y * b_sin, b_y * b_cos - b_x * b_sin
    o_map = i_h * (2 * HALF * COLUMNS) + o_p[:, None] * COLUMNS + o_w[None, :]
    o_factor = i_h * (3 * COLUMNS) + o_w
    p_factor = p_factors.to(tl.pointer_type(tl.float32), bitcast=True) + o_factor
    first = i_bh * (k_capacity // GROUP) * rows
    p_out = p_mapped + (first + o_r)[:, None] * COLUMNS + o_w[None, :]
    b_shift = tl.zeros([M, CHUNK], tl.float32)
    # In float32 at D = 256, copies ahead would not fit the 64 KB of shared memory of AMD's GPUs.
    for column in tl.range(0, COLUMNS, CHUNK, num_stages=STAGES if FAST else 1):
        m_w = column + o_w < COLUMNS
        p_tile = p_map + o_map + column
        b_map = tl.load(p_tile, mask=m_w[None, :], other=0.0).to(DTYPE)
        b_tile = tl.dot(b_x, b_map, input_precision="ieee")
        b_map = tl.load(p_tile + HALF * COLUMNS, mask=m_w[None, :], other=0.0).to(DTYPE)
        b_tile = tl.dot(b_y, b_map, b_tile, input_precision="ieee")
        b_tile *= tl.load(p_factor + (COLUMNS if FAST else 0) + column, mask=m_w, other=0.0)[None, :]
        if FAST:
            b_shift += b_tile * tl.load(p_factor + 2 * COLUMNS + column, mask=m_w, other=0.0)[None, :]
        b_tile = tl.permute(tl.reshape(b_tile.to(DTYPE), [M, CHUNK // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
        tl.store(p_out + column, tl.reshape(b_tile, [M, CHUNK]), mask=m_r[:, None] & m_w[None, :])
    tl.store(p_shift + first + o_r, tl.sum(b_shift, 1), mask=m_r)
    tl.store(p_rows + (i_bh * rows + o_r) * 2, tl.exp2(b_power) * tl.load(p_bound) * scaling, mask=m_r & (o_r < rows))


def turn_call(side: KernelSide, query: torch.Tensor, heads: int, scaling: float, inputs: dict[str, Any]) -> KernelCall:
    """Launch of `turn_kernel`; arguments as of `query.map_query_call`."""
    (batch, query_heads, count, dim), meta = query.shape, side.meta
    assert isinstance(meta, Digits)
    rows, groups, fast = query_heads // heads * count, inputs["k_capacity"] // meta.group, is_fast(query.dtype)
    exact = query.dtype == torch.float32
    pairs = PAIRS_AT_ONCE // 2 if exact else PAIRS_AT_ONCE
    tables = side.tables_as(torch.float32 if exact else torch.float16)
    arguments = dict(
        p_q=query, p_order=tables[ORDER.value], p_map=tables[MAP.value], p_factors=tables[FACTORS.value],
        p_bound=side.query_bound,
        p_mapped=query.new_empty(
            batch, heads, groups, rows, meta.columns, dtype=torch.float16 if fast else torch.float32
        ),
        p_rows=query.new_empty(batch, heads, rows, 2, dtype=torch.float32),
        p_shift=query.new_empty(batch, heads, groups, rows, dtype=torch.float32),
        scaling=scaling, rows=rows, DIM=dim, HALF=max(16, next_power_of_2(dim // 2)), META=meta, M=pairs,
        BOUNDED=inputs["s_packed"] > 0, ERAS=side.eras is not None, FAST=fast, num_warps=4, **launch_options(),
    )  # fmt: skip
    shared = ("p_rope", "p_packed", "n_packed", "k_capacity", "rope_capacity", "s_packed")
    arguments |= {name: inputs[name] for name in shared}
    more = 0 if side.eras is None else len(side.eras) - 3  # programs: each era but the last may fill one in part
    return turn_kernel, (-(-groups * rows // pairs) + more, heads, batch), arguments


@triton.jit
def part_levels(tile, META: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Tiles of the levels of the digits of part `AT`: those of one bit are ±0.5.

    FAST: in units of `SMALL`, and those of one bit in place, 0 or 2^field in units of `UNIT`.
    """
    PART: tl.constexpr = META.parts[AT]
    CODES: tl.constexpr = PART.codes
    if FAST and PART.places >= 0:
        if CODES.bits == 1:
            b_fours = assembly.load_bytes(low_plane(tile, CODES), tile, CODES.words, CODES.padded, CODES.count)
            b_levels = assembly.assembled(BIT, (b_fours, tile.words[PART.places]))
            if CODES.padded < TILE:
                b_levels = assembly.joined(b_levels, True)
        else:
            b_words = tile.words[: META.tables] + (tile.words[PART.places],)
            b_levels = lookup.levels(tile, b_words, CODES, 0, False, FOURS=True)
    else:
        b_levels = ()
        b_codes = load_codes(tile, CODES)
        for i in tl.static_range(len(b_codes)):
            if CODES.bits == 2:
                b_tile = tl.load(tile.tables[LEVELS] + b_codes[i]) * (SMALL if FAST else 1.0)
            elif FAST:
                o_field = i * (TILE // CODES.padded) + tl.arange(0, TILE) // CODES.padded
                b_tile = (b_codes[i] << o_field[None, :]).to(tl.int16).to(tl.float16, bitcast=True)
            else:
                b_tile = b_codes[i].to(DTYPE) - 0.5
            b_levels = b_levels + (b_tile.to(DTYPE),)
    return b_levels


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = scale[t] Σ_w (A q_g)_w L[digit_w[t]] + places[b] · (means q_g), in `UNIT`.

    b_q: the group's queries as `turn_kernel` makes them, and their constant.
    """
    MEANS: tl.constexpr = len(b_q) - 2
    DTYPE: tl.constexpr = b_q[0].dtype
    b_scale = load_scales(tile.fields[META.scale], tile).to(tl.float32)
    if not FAST:
        b_scale *= UNIT
    o_place = (tile.o_row % META.group).to(tl.int32) + tile.o_t
    p_places = tile.tables[PLACES] + (tile.i_h * META.group + o_place)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(META.parts)):
        b_levels = part_levels(tile, META, i, DTYPE, FAST)
        for j in tl.static_range(len(b_levels)):
            b_s = tl.dot(b_levels[j], b_q[META.parts[i].tile + j], b_s, input_precision="ieee")
    # Not as the third operand of this product, which Triton would also make of a sum: nothing that reaches a product in
    # that place is prefetched, and each iteration would wait for the scales.
    b_means = tl.dot(tl.load(p_places).to(DTYPE), b_q[MEANS], input_precision="ieee")
    return tl.fma(b_s + b_q[MEANS + 1][None, :], b_scale[:, None].broadcast_to(b_s.shape), b_means)


def spectral_side(
    context: CodecContext, group: int, digits: DigitCodes, levels: torch.Tensor, directions: torch.Tensor,
    means: torch.Tensor, places: torch.Tensor,
) -> KernelSide:  # fmt: skip
    """Kernel operands of digits of keys. Code space: real and imaginary parts of 16 pairs in turn.

    group: tokens with one anchor.
    levels: of digits of two bits, float32 `[4]`.
    directions: keys of each channel, `[H, D, D]`, in 11 bits.
    means, places: factors of the mean key at each place in a group, `[H, rank, D]` and `[H, group, rank]`.
    """
    device, dim, rope = context.device, context.head_dim, context.rope
    chosen = digits.channels.long()[..., None].expand(*digits.channels.shape, dim)
    by_digit = directions.gather(1, chosen)
    runs, rows, factors = [], [], []
    digit = 0
    planes = [(bits, width) for bits, width in zip((2, 1), digits.counts, strict=True) if width]
    for field, (bits, width) in enumerate(planes):
        words, run = words_per_token(width), slice(digit, digit + width)
        by_word = by_digit[:, run].unflatten(1, (8, words))
        weights = digits.weights[:, run].unflatten(1, (8, words))
        exponents = torch.arange(8.0, device=device)[:, None]
        if bits == 2:
            kinds = weights, weights * (UNIT.value / SMALL.value), torch.zeros_like(weights)
        else:
            kinds = 2 * weights, weights * 2 ** (1 - exponents), (-(2.0 ** (exponents - 25))).expand_as(weights)
        for at in range(0, words, TILE.value):
            count = min(words - at, TILE.value)
            padded = 8 if count <= 8 else 16
            runs.append(Codes(bits, field, words, at, count, padded))
            rows.append(functional.pad(by_word[:, :, at : at + count], (0, 0, 0, padded - count)).flatten(1, 2))
            by_run = torch.stack(kinds, 1)[..., at : at + count]
            factors.append(functional.pad(by_run, (0, padded - count)).flatten(2, 3))
        digit += width
    sizes = sorted({codes.padded for codes in runs if _fits(codes)}, reverse=True)
    tables = [assembly.byte_table(SMALL.value * levels.cpu(), 2)] if digits.counts.twos else []
    ahead = sum(map(len, tables))
    parts, fours, tile = [], [], 0
    for codes in runs:
        fours += [_fits(codes) and assembly.in_fours(codes.padded)] * (8 * codes.padded // TILE.value)
        parts.append(Part(codes, ahead + sizes.index(codes.padded) if _fits(codes) else -1, tile))
        tile += 8 * codes.padded // TILE.value
    unit, means, places = _scaled(directions, means, places)
    of_means = torch.tensor([SMALL.value, SMALL.value, 0.0], device=device)
    factors.append(of_means[:, None].expand(len(means), 3, means.shape[1]))
    half = dim // 2
    order = torch.tensor(rope.order if rope else range(dim), device=device).view(2, half)
    spread = functional.pad(torch.eye(dim, device=device)[order], (0, 0, 0, max(16, next_power_of_2(half)) - half))
    spread = spread.flatten(0, 1)
    matrix = torch.cat([*(run / unit for run in rows), means], 1)
    meta = Digits(
        tuple(parts), scale=len(planes), tables=ahead, group=group, rotary=rope.rotary if rope else 0,
        columns=matrix.shape[1], in_order=rope is None or rope.in_order,
    )  # fmt: skip
    return KernelSide(
        score,
        meta,
        (TILE.value,) * (matrix.shape[1] // TILE.value),
        tables=(
            spread @ matrix.mT,
            places,
            levels,
            torch.cat(factors, 2).contiguous().view(torch.int32),
            order.int().flatten(),
        ),
        words=torch.cat([*tables, *map(_places, sizes)]).to(device) if sizes else None,
        places=sum(sizes),
        tokens=min(group, 64 if dim <= 64 else 32),
        warps=assembly.warps(dim),
        matrix=torch.full((1, 1, 1), unit / UNIT.value, device=device),
        map_call=turn_call,
        group=group,
        fours=(*fours, False),
        by_head=(MAP.value, PLACES.value, FACTORS.value),
    )


def _places(words: int) -> torch.Tensor:
    """`assembly.places`, with a byte's selectors as A and as B in nibbles 0 and 2 of the low half, int32 `[words]`."""
    byte = torch.arange(words, dtype=torch.int32, device="cpu") % 4
    return assembly.places(words) & -0x10000 | byte | 4 + byte << 8


def _fits(codes: Codes) -> bool:
    """True if `lookup.levels` can unpack digits: it reads some planes as words of 32 bits."""
    if codes.bits == 2:
        return codes.padded >= TILE.value or codes.words % 2 == codes.count % 2 == 0
    return codes.words % 4 == codes.count % 4 == 0


def _scaled(
    directions: torch.Tensor, means: torch.Tensor, places: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Unit of the scores, and the factors of the table of means, for scores in this unit: all fit float16."""
    length = float(means.abs().sum(-1).max().clamp_min(1e-30))
    unit = max(float(directions.abs().sum(-1).max()), float(places.abs().max()) * length / HIGHEST) / WIDEST
    unit = 2.0 ** math.ceil(math.log2(unit))  # as others would round the directions
    return unit, means * (WIDEST / length), places * (SMALL.value * length / WIDEST / unit)
