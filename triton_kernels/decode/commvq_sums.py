"""CommVQ's values without reading a codebook row: weights summed by code (the paper's equation 22, in our symbols).

    S_k,c = Σ_t p[t] scale[t] [a_k[t] >= c],    output = Σ_k,c (S_k,c - S_k,c+1) C_k,c = Σ_k,c S_k,c (C_k,c - C_k,c-1)

Code a_k of a token names a row of codebook C_k (k counts the rounds of all groups). Sums over all codes from c on need
one saturating addition for two numbers where sums by code would need a comparison. They are products of the tensor
cores: a matrix of ones and zeros `[centres, T]` times the weights `[T, M]`, one per code, and each warp has codes of
its own. `fold_kernel` then multiplies by the codebooks, once for all tokens.

Two codes of up to 8 bits lie in two bytes of a token, wherever they begin: together they are a *unit*.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.constants import on_cpu
from kvcache_compress.triton_kernels.common import assembly
from kvcache_compress.triton_kernels.common.codes import load_scales
from kvcache_compress.triton_kernels.common.operands import FEW_ROWS, KernelSide, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import KernelCall

if TYPE_CHECKING:
    from kvcache_compress.methods.commvq.residual import ResidualBooks

UNITS = tl.constexpr(8)
"""Units that are summed at a time, one per warp."""
TOKENS = 64
"""Tokens per tile: the ones and zeros of more would spill registers."""
LEAST_CENTRES = 16
"""Sums of a code, at least: the rows of the tensor cores' tile."""
MOST_SUMS = 4096
"""Most sums of a query row: with more, eight warps have no registers for them."""
USUAL_SPLITS = 128
"""Splits to which their sums are padded, more than there are, so that the kernel is compiled once."""
MOST_PARTS = 63
"""Most parts of the output, by codes."""
PERIOD = tl.constexpr(16)
"""Tokens after which the places of a code's bytes in words of 32 bits repeat; any multiple of 4."""


class Sums(NamedTuple):
    """Bits of a code, sums of a code (its centres, or 16 if there are fewer), bytes of a row and of all heads' rows."""

    bits: int
    centres: int
    row: int
    bytes: int


def _unpack(bits: int) -> str:
    """Assembly: both codes of a unit plus 1024, of two tokens, from the words of the unit's bytes and their places."""
    mask = (1 << bits) - 1
    mask |= mask << 16
    return assembly.text(
        "prmt.b32 r0, $2, $4, $6",
        "prmt.b32 r1, $3, $5, $7",
        "prmt.b32 r0, r0, r1, 0x5410",
        "shf.r.wrap.b32 r0, r0, r0, $8",  # the bits that wrap around are masked
        f"lop3.b32 $0, r0, {mask:#x}, 0x64006400, 0xea",
        f"shr.u32 r1, r0, {bits}",
        f"lop3.b32 $1, r1, {mask:#x}, 0x64006400, 0xea",
    ).value


UNPACK = tl.constexpr(tuple(map(_unpack, range(1, 9))))
"""Assembly by bits less one."""
UNPACK_REGISTERS = assembly.registers(2, 7)
REACHES = assembly.text("add.sat.f16x2 $0, $1, $2")
REACHES_REGISTERS = assembly.registers(1, 2)


@triton.jit
def _place(i_byte, i_h, s_head, o_row, META: tl.constexpr):
    """Byte of the tile's first token at which byte `i_byte` of its codes lies, over the rows of all heads."""
    ROW: tl.constexpr = META.row
    BYTES: tl.constexpr = META.bytes
    i_byte = tl.minimum(i_byte, BYTES - 1)
    return (o_row + (i_byte // ROW - i_h) * s_head) * ROW + i_byte % ROW


@triton.jit
def accumulate_sums(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weights summed by code; tiles are the first or the second codes of `UNITS` units, `[UNITS * centres, M]`.

    With FAST all operands of the tensor cores are made where they are used. The compiler moves them to that layout
    only if they come from loads and constants alone, so places and shifts are read from tables.
    """
    BITS: tl.constexpr = META.bits
    ROW: tl.constexpr = META.row
    N: tl.constexpr = META.centres
    T: tl.constexpr = o_t.shape[0]
    M: tl.constexpr = b_p.shape[1]
    b_scale = load_scales(fields[1], o_row, o_t, m_t).to(tl.float32)
    b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_weights = tl.broadcast_to(b_weights[None, :, :], [UNITS, T, M])
    i_first = tl.load(tables[0] + 3 * i_h + 2)
    o_unit, o_token = tl.arange(0, UNITS)[:, None, None], o_t[None, None, :]
    m_token = m_t[None, None, :]
    if FAST:
        b_centre = tl.reshape(words[0], [1, N, 1]).to(tl.int16).to(tl.float16, bitcast=True)
        b_shift = tl.reshape(words[1], [UNITS, 1, 1]).to(tl.int16)
    else:
        b_centre = tl.arange(0, N)[None, :, None]
        b_shift = o_unit * (2 * BITS) % 8
    p_words = fields[0].to(tl.pointer_type(tl.int32), bitcast=True)
    b_sums = ()
    for j in tl.static_range(len(b_acc) // 2):
        i_byte = i_first + (j * UNITS + o_unit) * (2 * BITS) // 8
        o_low, o_high = _place(i_byte, i_h, s_head, o_row, META), _place(i_byte + 1, i_h, s_head, o_row, META)
        # As words of 32 bits, as nothing narrower is copied ahead (see `load_scales`).
        b_low = tl.load(p_words + ((o_low + o_token * ROW) >> 2), mask=m_token, other=0)
        b_high = tl.load(p_words + ((o_high + o_token * ROW) >> 2), mask=m_token, other=0)
        o_places = ((o_low & 3) * 4 + (o_high & 3)) * PERIOD
        b_places = tl.load(tables[1] + o_places + tl.arange(0, PERIOD)[None, None, :])
        b_places = tl.broadcast_to(b_places[:, :, None, :], [UNITS, 1, T // PERIOD, PERIOD])
        b_places = tl.reshape(b_places, [UNITS, 1, T])
        if FAST:
            b_codes = tl.inline_asm_elementwise(
                UNPACK[BITS - 1], UNPACK_REGISTERS,
                [b_low, b_high, b_places, tl.broadcast_to(b_shift, [UNITS, 1, T])],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            b_unit = (b_low >> (b_places & 3) * 8) & 255 | ((b_high >> (b_places >> 4 & 3) * 8) & 255) << 8
            b_unit = b_unit >> b_shift
            b_codes = (b_unit & (2**BITS - 1), (b_unit >> BITS) & (2**BITS - 1))
        for i in tl.static_range(2):
            if FAST:
                b_reached = tl.inline_asm_elementwise(
                    REACHES, REACHES_REGISTERS,
                    [tl.broadcast_to(b_codes[i], [UNITS, N, T]), tl.broadcast_to(b_centre, [UNITS, N, T])],
                    dtype=tl.float16, is_pure=True, pack=2,
                )  # fmt: skip
            else:
                b_reached = (b_codes[i] >= b_centre).to(DTYPE)
            b_sum = tl.reshape(b_acc[2 * j + i], [UNITS, N, M])
            b_sum = tl.dot(b_reached, b_weights, b_sum, input_precision=PRECISION)
            b_sums = b_sums + (tl.reshape(b_sum, [UNITS * N, M]),)
    return b_sums


@triton.jit(do_not_specialize=("splits",))
def fold_kernel(
    p_acc, p_stats, p_books, p_places, p_parts, p_part_stats, splits, H, rows, W,
    CENTRES: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, DENSE: tl.constexpr, S_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the splits' sums and multiply them by the codebooks: a part of the output for each program's codes.

    Parts look like splits to `merge_kernel`, with the softmax's sum in the first of them.
    """
    i_p, i_bh, parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    i_h = i_bh % H
    o_s, o_r, o_n, o_v = tl.arange(0, S_PAD), tl.arange(0, M), tl.arange(0, N), tl.arange(0, D_PAD)
    m_r = o_r < rows
    p_stats += i_bh * (splits + DENSE) * rows * 2
    m_s = (o_s < splits)[:, None] & m_r[None, :]
    o_stats = (o_s[:, None] * rows + o_r[None, :]) * 2
    b_m = tl.load(p_stats + o_stats, mask=m_s, other=float("-inf"))
    b_l = tl.load(p_stats + o_stats + 1, mask=m_s, other=0.0)
    b_top = tl.max(b_m, 0)
    b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
    # Products are rounded before lanes exchange them, see `launch_options`.
    b_total = tl.sum(tl.fma(tl.exp2(b_m - b_safe[None, :]), b_l, 0.0), 0)
    first, n_rounds = tl.load(p_places + 3 * i_h), tl.load(p_places + 3 * i_h + 1)
    p_acc += i_bh * splits * rows * W
    b_out = tl.zeros([M, D_PAD], tl.float32)
    for code in range(i_p, GROUPS * n_rounds, parts):
        unit = code // 2
        o_w = ((unit // UNITS * 2 + code % 2) * UNITS + unit % UNITS) * N + o_n
        b_sum = tl.zeros([M, N], tl.float32)
        for start in range(0, splits, CHUNK):
            o_c = start + tl.arange(0, CHUNK)
            m_c = (o_c < splits)[:, None] & m_r[None, :]
            o_row = o_c[:, None] * rows + o_r[None, :]
            b_share = tl.exp2(tl.load(p_stats + o_row * 2, mask=m_c, other=float("-inf")) - b_safe[None, :])
            b_acc = tl.load(p_acc + o_row[:, :, None] * W + o_w[None, None, :], mask=m_c[:, :, None], other=0.0)
            b_sum += tl.sum(tl.fma(b_acc, b_share[:, :, None], 0.0), 0)
        o_column = o_v - code // n_rounds * WIDTH
        m_column = ((o_column >= 0) & (o_column < WIDTH))[None, :]
        p_rows = p_books + ((first + code) * CENTRES + o_n)[:, None] * WIDTH + o_column[None, :]
        b_rows = tl.load(p_rows, mask=(o_n < CENTRES)[:, None] & m_column, other=0.0).to(tl.float32)
        m_before = ((o_n > 0) & (o_n < CENTRES))[:, None] & m_column
        b_rows -= tl.load(p_rows - WIDTH, mask=m_before, other=0.0).to(tl.float32)
        b_out = tl.dot(b_sum, b_rows, b_out, input_precision="ieee")
    D: tl.constexpr = GROUPS * WIDTH
    p_parts += ((i_bh * parts + i_p) * rows + o_r) * D
    tl.store(p_parts[:, None] + o_v[None, :], b_out, mask=m_r[:, None] & (o_v < D)[None, :])
    p_part_stats += i_bh * (parts + DENSE) * rows * 2 + o_r * 2
    tl.store(p_part_stats + i_p * rows * 2, b_top, mask=m_r)
    tl.store(p_part_stats + i_p * rows * 2 + 1, tl.where(i_p == 0, b_total, 0.0), mask=m_r)
    if i_p == 0:
        for i in tl.static_range(2 * DENSE):
            o_i = i // 2 * rows * 2 + i % 2
            b_dense = tl.load(p_stats + (splits * rows + o_r) * 2 + o_i, mask=m_r, other=0.0)
            tl.store(p_part_stats + parts * rows * 2 + o_i, b_dense, mask=m_r)


def fold_call(books: ResidualBooks, attended: dict[str, Any]) -> KernelCall:
    """Launch of `fold_kernel` for what `attend_kernel` fills, result buffers included.

    p_parts, p_part_stats: float32 `[B, H, parts, rows, D]` and `[B, H, parts + dense, rows, 2]`.
    """
    p_acc, (centres, width) = attended["p_acc"], books.books.shape[1:]
    batch, heads, splits, rows, sums = p_acc.shape
    dense = attended["p_dense"].shape[2]
    parts, dim = min(MOST_PARTS, books.groups * max(books.rounds)), books.groups * width
    arguments = dict(  # noqa: C408 - named as the kernel's parameters are
        p_acc=p_acc, p_stats=attended["p_stats"], p_books=books.books, p_places=books.places,
        p_parts=p_acc.new_empty(batch, heads, parts, rows, dim),
        p_part_stats=p_acc.new_empty(batch, heads, parts + dense, rows, 2),
        splits=splits, H=heads, rows=rows, W=sums, CENTRES=centres, N=max(LEAST_CENTRES, centres),
        GROUPS=books.groups, WIDTH=width, D_PAD=max(16, next_power_of_2(dim)), M=FEW_ROWS, DENSE=dense,
        S_PAD=max(USUAL_SPLITS, next_power_of_2(splits)), CHUNK=8, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return fold_kernel, (parts, batch * heads, 1), arguments


@on_cpu
def sums_side(books: ResidualBooks) -> KernelSide | None:
    """Kernel operands of values by sums, for at most `FEW_ROWS` rows; None if there are too many sums."""
    bits, centres = books.index_bits, max(LEAST_CENTRES, books.books.shape[1])
    passes = -(-books.groups * max(books.rounds) // (2 * UNITS.value))
    widths = (UNITS.value * centres,) * (2 * passes)
    if sum(widths) > MOST_SUMS:
        return None
    thresholds = (-1023.0 - torch.arange(centres)).to(torch.float16).view(torch.int16)  # 1 for 1024 and more above
    words = torch.cat([thresholds, torch.arange(UNITS.value) * 2 * bits % 8]).int()
    near = (torch.arange(4)[:, None] + torch.arange(PERIOD.value) * books.row) % 4
    places = near[:, None] + 16 * (near + 4)  # nibbles of `prmt`: bytes 0 to 3 of the first word, 4 to 7 of the second
    device = books.books.device
    return KernelSide(
        score=None,
        accumulate=accumulate_sums,
        meta=Sums(bits, centres, books.row, len(books.rounds) * books.row),
        widths=widths,
        tables=(books.places, places.int().contiguous().to(device)),
        words=words.to(device),
        places=len(words),
        tokens=TOKENS,
        most_tokens=TOKENS,
        warps=UNITS.value,
        fold=functools.partial(fold_call, books),
    )
