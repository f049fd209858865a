"""TurboQuant's encoders: rotation, norm, codes and stored scalar of a run of tokens in one launch.

`encode_tokens` follows the contract of `KernelEncoder`, so steps of static layers use it too (`write_slots.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs import trellis
from kvcache_compress.codecs.layout import PLANE_WORD, PLANES, padded_width, padded_words, words_per_token
from kvcache_compress.codecs.lloyd_max import boundaries
from kvcache_compress.triton_kernels.common.codes import store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, launch_options

from .rotate import rotated
from .trellis import best_path

if TYPE_CHECKING:
    from kvcache_compress.methods.turboquant.codec import TurboQuantCodec

MAX_WIDTH = 256
"""Most channels of a channel set: wider tiles would spill registers and exceed shared memory."""
MAX_TRELLIS_WIDTH = 128
"""The same for trellis codes."""
SCALARS = ("norm", "match", "unbiased", "least_squares")
"""Stored scalars; kernels get their index, as Triton takes no strings in tuples of tuples."""
NORM, MATCH, UNBIASED = (tl.constexpr(number) for number in range(3))


class Sets(NamedTuple):
    """Constants of the channel sets: bits of a code, words of a token, the same padded, planes, first field, stride.

    stride: head stride of a set's rows; trellis: True for trellis codes. Of all sets: index of the stored scalar, and
    whether keys are centred.
    """

    bits: tuple[int, ...]
    words: tuple[int, ...]
    padded: tuple[int, ...]
    planes: tuple[int, ...]
    field: tuple[int, ...]
    stride: tuple[int, ...]
    trellis: tuple[bool, ...]
    scalar: int
    centred: bool


@triton.jit
def nearest_codes(b_z, p_levels, p_bounds, BITS: tl.constexpr):
    """Codes of the levels nearest to the coordinates."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    b_codes = tl.zeros(b_z.shape, tl.int32)
    for i in tl.static_range(2**BITS - 1):
        b_codes = tl.where(b_z > tl.load(p_bounds + i), i + 1, b_codes)
    turned = tl.where(tl.load(p_levels) > tl.load(p_levels + 1), HALF - 1, 0)  # levels in `outward` order
    return tl.where(b_codes < HALF, b_codes ^ turned, b_codes)


@triton.jit
def nearest_units(b_z, p_levels, p_bounds, BITS: tl.constexpr, STEPS: tl.constexpr):
    """Levels nearest to the coordinates, in whole steps."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    turned = tl.where(tl.load(p_levels) > tl.load(p_levels + 1), HALF - 1, 0)  # levels in `outward` order
    b_units = tl.zeros(b_z.shape, tl.int32) + (tl.load(p_levels + turned) * STEPS).to(tl.int32)
    for i in tl.range(1, 2**BITS, disable_licm=True):
        level = tl.load(p_levels + tl.where(i < HALF, i ^ turned, i))
        b_units = tl.where(b_z > tl.load(p_bounds + i - 1), (level * STEPS).to(tl.int32), b_units)
    return b_units


@triton.jit
def quantize_tile(
    b_z, b_norm, m_z, p_levels, p_bounds, p_low, p_high, p_scale, o_n, m_n,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Pack the codes of coordinates `[T, 8, PADDED]` and store the scalar (see `quantize` of `scalar` and `trellis`).

    `p_bounds` are the boundaries of the levels, or the levels of a trellis in whole steps.
    """
    if TRELLIS:
        b_codes, b_index = best_path(b_z, p_bounds, BITS, WORDS, PADDED)
    elif SCALAR == NORM or BITS == 1:
        b_codes = nearest_codes(b_z, p_levels, p_bounds, BITS)
    else:
        # Scales are compared in integers (see `scalar.quantize`): sums are equal whatever their order.
        STEPS: tl.constexpr = 256 * (8 * WORDS) ** 0.5
        b_best = tl.full(b_norm.shape, -1.0, tl.float64)
        b_factor = tl.zeros(b_norm.shape, tl.float32)
        for i in tl.range(5, disable_licm=True):
            factor = (26 + 3 * i) / 32
            b_units = tl.where(m_z, nearest_units(b_z * factor, p_levels, p_bounds, BITS, STEPS), 0)
            b_cross = tl.sum(tl.sum((b_z * STEPS).to(tl.int32) * b_units, 2), 1).to(tl.float64)
            b_closeness = b_cross * b_cross / tl.sum(tl.sum(b_units * b_units, 2), 1).to(tl.float64)
            b_factor = tl.where(b_closeness > b_best, factor, b_factor)
            b_best = tl.maximum(b_closeness, b_best)
        b_codes = nearest_codes(b_z * b_factor[:, None, None], p_levels, p_bounds, BITS)
    store_codes(b_codes, p_low, p_high, o_n, m_n, BITS, WORDS, PADDED)
    b_scale = b_norm
    if SCALAR != NORM:
        b_point = tl.where(m_z, tl.load(p_levels + (b_index if TRELLIS else b_codes)), 0.0)
        # A zero vector's products are all -0.0 at negative levels; torch's sums begin with 0.0.
        b_cross = tl.sum(tl.sum(b_z * b_point, 2), 1) + 0.0
        b_square = tl.sum(tl.sum(b_point * b_point, 2), 1)
        if SCALAR == MATCH:
            b_scale = b_scale / tl.sqrt(b_square)
        elif SCALAR == UNBIASED:
            b_scale = b_scale * tl.sum(tl.sum(b_z * b_z, 2), 1) / tl.maximum(b_cross, 1e-12)
        else:
            b_scale = b_scale * b_cross / b_square
    tl.store(p_scale + o_n, tl.minimum(b_scale, 65504.0).to(tl.float16), mask=m_n)


@triton.jit(do_not_specialize=("N",))
def quantize_kernel(
    p_z, p_norm, p_levels, p_bounds, p_low, p_high, p_scale, N,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, TRELLIS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize vectors that are already rotated and normalised, by `quantize_tile`."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_c = tl.arange(0, PADDED)
    o_i = tl.arange(0, 8)[:, None] * WORDS + o_c[None, :]
    m_z = m_n[:, None, None] & (o_c < WORDS)[None, None, :]
    b_z = tl.load(p_z + o_n[:, None, None] * (8 * WORDS) + o_i[None, :, :], mask=m_z, other=0.0)
    b_norm = tl.load(p_norm + o_n, mask=m_n, other=0.0)
    quantize_tile(
        b_z, b_norm, m_z, p_levels, p_bounds, p_low, p_high, p_scale, o_n, m_n, BITS, WORDS, PADDED, SCALAR, TRELLIS
    )


@triton.jit
def encode_set(
    p_x, o_x, m_t, p_rows, p_levels, p_bounds, p_mean, p_low, p_high, p_scale, o_row, D: tl.constexpr,
    BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, SCALAR: tl.constexpr, TRELLIS: tl.constexpr,
    CENTRED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotate and normalise the tokens of one channel set, then quantize them (Algorithm 1)."""
    # Channels in memory order, with zeros as padding.
    o_c = tl.arange(0, 8 * PADDED)
    o_w, m_w = o_c // PADDED * WORDS + o_c % PADDED, o_c % PADDED < WORDS
    b_z = rotated(p_x, o_x, m_t, p_rows, o_w, m_w, p_mean, D, CENTRED, PRECISION)
    b_norm = tl.sqrt(tl.sum(b_z * b_z, 1))
    b_z = tl.reshape(b_z / tl.maximum(b_norm, 1e-30)[:, None], [o_x.shape[0], 8, PADDED])
    m_z = m_t[:, None, None] & (tl.arange(0, PADDED) < WORDS)[None, None, :]
    quantize_tile(
        b_z, b_norm, m_z, p_levels, p_bounds, p_low, p_high, p_scale, o_row, m_t, BITS, WORDS, PADDED, SCALAR, TRELLIS
    )


@triton.jit
def encode_tokens(
    p_x, o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h, D: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode one channel set after the other (Algorithm 1; section 4.3).

    `tables` are rows `[H or 1, width, D]`, levels and `search_table` of each set, then the mean `[H, D]`.
    """
    SETS: tl.constexpr = len(META.bits)
    for i in tl.static_range(SETS):
        encode_set(
            p_x, o_x, m_t, tables[3 * i] + i_h * META.stride[i], tables[3 * i + 1], tables[3 * i + 2],
            tables[3 * SETS] + i_h * D, fields[META.field[i]], fields[META.field[i] + META.planes[i] - 1],
            fields[META.field[i] + META.planes[i]], o_row, D, META.bits[i], META.words[i], META.padded[i],
            META.scalar, META.trellis[i], META.centred, PRECISION,
        )  # fmt: skip


def turboquant_encoder(codec: TurboQuantCodec) -> KernelEncoder | None:
    """Encoder of a prepared TurboQuant codec without a sketch, or None if a token would spill registers."""
    if any(padded_width(c.width) > (MAX_TRELLIS_WIDTH if c.trellis else MAX_WIDTH) for c in codec.components):
        return None
    sets, tables, at = [], [], 0
    for component, rows in zip(codec.components, codec.set_rows, strict=True):
        width, bits = component.width, component.bits
        rows = codec.encoding_rows(rows)
        stride = rows.stride(0) if len(rows) > 1 else 0
        planes = len(PLANES[bits])
        sets.append((bits, words_per_token(width), padded_words(width), planes, at, stride, component.trellis))
        tables += [rows, component.levels, search_table(component.levels, bits, width)]
        at += planes + 1
    tables.append(tables[0] if codec.mean is None else codec.mean)
    meta = Sets(*zip(*sets, strict=True), scalar=SCALARS.index(codec.scalar), centred=codec.mean is not None)
    return KernelEncoder(encode_tokens, meta, tuple(tables))


def is_trellis(levels: torch.Tensor, bits: int) -> bool:
    """True for the levels of a trellis, which are twice as many as codes of `bits` bits."""
    return len(levels) > 2**bits


def search_table(levels: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Numbers that coordinates are compared with: boundaries of the levels, or those of a trellis in whole steps."""
    return trellis.in_steps(levels, width) if is_trellis(levels, bits) else boundaries(levels)


def quantize(
    z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: str
) -> tuple[torch.Tensor, ...]:
    """Kernel twin of `scalar.quantize`: float32 `z` `[..., width]` and `norm` `[...]` to planes and scale.

    With the levels of a trellis, `[2 ** (bits + 1)]`, that of `trellis.quantize`.
    """
    grid, arguments, fields = quantize_arguments(z, norm, levels, bits, scalar)
    quantize_kernel[grid](**arguments)
    return fields


def quantize_arguments(
    z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: str
) -> tuple[tuple[int], dict[str, Any], tuple[torch.Tensor, ...]]:
    """Grid and arguments of `quantize_kernel`, and the fields that it fills."""
    shape, width = z.shape[:-1], z.shape[-1]
    words = words_per_token(width)
    planes = tuple(z.new_empty(*shape, words, dtype=PLANE_WORD[plane]) for plane in PLANES[bits])
    scale = z.new_empty(shape, dtype=torch.float16)
    block = 8 if width > 64 else 16
    arguments = dict(
        p_z=z.contiguous(), p_norm=norm.contiguous(), p_levels=levels, p_bounds=search_table(levels, bits, width),
        p_low=planes[0], p_high=planes[-1], p_scale=scale, N=norm.numel(),
        BITS=bits, WORDS=words, PADDED=padded_words(width), SCALAR=SCALARS.index(scalar),
        TRELLIS=is_trellis(levels, bits), BLOCK=block, **launch_options(fusion=False),
    )  # fmt: skip
    return (triton.cdiv(norm.numel(), block),), arguments, (*planes, scale)
