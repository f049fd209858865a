"""TurboQuant's encoders: rotation, norm, codes and stored scalar of a run of tokens in one launch.

`encode_tokens` follows the contract of `KernelEncoder`, so steps of static layers use it too (`update/step.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import PLANES, padded_width
from kvcache_compress.codecs.quantizers import trellis
from kvcache_compress.codecs.quantizers.scalar import Component, Scalar, boundaries
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, planes, store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder

from .trellis import best_path

MAX_WIDTH = 256
"""Most channels of a channel set: wider tiles would spill registers and exceed shared memory."""
MAX_TRELLIS_WIDTH = 128
"""The same for trellis codes."""
SCALARS: tuple[Scalar, ...] = ("norm", "match", "unbiased")
"""Stored scalars; kernels get their index, as Triton accepts no strings in tuples of tuples."""
NORM, MATCH, UNBIASED = (tl.constexpr(number) for number in range(3))


class Set(NamedTuple):
    """Constants of a channel set: its codes, the head stride of its rows, whether codes are a trellis's."""

    codes: Codes
    stride: int
    trellis: bool


class Sets(NamedTuple):
    """Channel sets, the index of the stored scalar, and whether keys are centred."""

    sets: tuple[Set, ...]
    scalar: int
    centred: bool


@triton.jit
def rotated(tile, p_rows, o_row, m_row, p_mean, D: tl.constexpr, CENTRED: tl.constexpr, PRECISION: tl.constexpr):
    """Products of a `NewTile`, less the mean, with rows `o_row`: float32 `[T, rows]`, zero unless `m_row`."""
    DEPTH: tl.constexpr = 32
    b_z = tl.zeros([tile.o_x.shape[0], o_row.shape[0]], tl.float32)
    for start in range(0, D, DEPTH):
        o_k = start + tl.arange(0, DEPTH)
        m_k = o_k < D
        m_x = tile.m_t[:, None] & m_k[None, :]
        b_x = tl.load(tile.p_x + tile.o_x[:, None] + o_k[None, :], mask=m_x, other=0.0).to(tl.float32)
        if CENTRED:
            b_x -= tl.load(p_mean + o_k, mask=m_k, other=0.0)[None, :]
        b_rows = tl.load(p_rows + o_row[:, None] * D + o_k[None, :], mask=m_row[:, None] & m_k[None, :], other=0.0)
        b_z = tl.dot(b_x, tl.trans(b_rows), b_z, input_precision=PRECISION)
    return b_z


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
def encode_set(tile, D: tl.constexpr, META: tl.constexpr, AT: tl.constexpr, PRECISION: tl.constexpr):
    """Rotate, normalise and quantize the tokens of channel set `AT` (Algorithm 1).

    Codes and scalar equal those of `quantize` in `scalar` and `trellis`.
    """
    SET: tl.constexpr = META.sets[AT]
    CODES: tl.constexpr = SET.codes
    BITS: tl.constexpr = CODES.bits
    WORDS: tl.constexpr = CODES.words
    PADDED: tl.constexpr = CODES.padded
    TRELLIS: tl.constexpr = SET.trellis
    SCALAR: tl.constexpr = META.scalar
    p_rows = tile.tables[3 * AT] + tile.i_h * SET.stride
    p_levels, p_bounds = tile.tables[3 * AT + 1], tile.tables[3 * AT + 2]
    p_mean = tile.tables[3 * len(META.sets)] + tile.i_h * D
    # Channels in memory order, with zeros as padding.
    o_c = tl.arange(0, 8 * PADDED)
    o_w, m_w = o_c // PADDED * WORDS + o_c % PADDED, o_c % PADDED < WORDS
    b_z = rotated(tile, p_rows, o_w, m_w, p_mean, D, META.centred, PRECISION)
    b_scale = tl.sqrt(tl.sum(b_z * b_z, 1))
    b_z = tl.reshape(b_z / tl.maximum(b_scale, 1e-30)[:, None], [tile.o_x.shape[0], 8, PADDED])
    m_z = tile.m_t[:, None, None] & (tl.arange(0, PADDED) < WORDS)[None, None, :]
    if TRELLIS:
        b_codes, b_index = best_path(b_z, p_bounds, BITS, WORDS, PADDED)
    elif SCALAR == NORM or BITS == 1:
        b_codes = nearest_codes(b_z, p_levels, p_bounds, BITS)
    else:
        # Scales are compared in integers (see `scalar.quantize`): sums are equal whatever their order.
        STEPS: tl.constexpr = 256 * (8 * WORDS) ** 0.5
        b_best = tl.full(b_scale.shape, -1.0, tl.float64)
        b_factor = tl.zeros(b_scale.shape, tl.float32)
        for i in tl.range(5, disable_licm=True):
            factor = (26 + 3 * i) / 32
            b_units = tl.where(m_z, nearest_units(b_z * factor, p_levels, p_bounds, BITS, STEPS), 0)
            b_cross = tl.sum(tl.sum((b_z * STEPS).to(tl.int32) * b_units, 2), 1).to(tl.float64)
            b_closeness = b_cross * b_cross / tl.sum(tl.sum(b_units * b_units, 2), 1).to(tl.float64)
            b_factor = tl.where(b_closeness > b_best, factor, b_factor)
            b_best = tl.maximum(b_closeness, b_best)
        b_codes = nearest_codes(b_z * b_factor[:, None, None], p_levels, p_bounds, BITS)
    store_codes(b_codes, tile, CODES)
    if SCALAR != NORM:
        b_point = tl.where(m_z, tl.load(p_levels + (b_index if TRELLIS else b_codes)), 0.0)
        # A zero vector's products are all -0.0 at negative levels; torch's sums begin with 0.0.
        b_cross = tl.sum(tl.sum(b_z * b_point, 2), 1) + 0.0
        b_square = tl.sum(tl.sum(b_point * b_point, 2), 1)
        if SCALAR == MATCH:
            b_scale = b_scale / tl.sqrt(b_square)
        else:
            b_scale = b_scale * tl.sum(tl.sum(b_z * b_z, 2), 1) / tl.maximum(b_cross, 1e-12)
    p_scale = tile.fields[CODES.field + planes(BITS)]
    tl.store(p_scale + tile.o_row, tl.minimum(b_scale, 65504.0).to(tl.float16), mask=tile.m_t)


@triton.jit
def encode_tokens(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode one channel set after the other (Algorithm 1; section 4.3).

    `tables` are, of each set, rows `[H or 1, width, D]`, levels, and their boundaries or the levels of a trellis in
    whole steps; then the mean `[H, D]`.
    """
    for i in tl.static_range(len(META.sets)):
        encode_set(tile, D, META, i, PRECISION)


def turboquant_encoder(
    components: Sequence[Component], basis: Sequence[torch.Tensor], scalar: Scalar, mean: torch.Tensor | None
) -> KernelEncoder | None:
    """Encoder of tokens less the `mean` `[H, D]` of keys, if any; None if a token would spill registers.

    basis: rows of each component, `[H or 1, width, D]`, contiguous.
    """
    if any(padded_width(c.width) > (MAX_TRELLIS_WIDTH if c.trellis else MAX_WIDTH) for c in components):
        return None
    sets, tables, field = [], [], 0
    for component, rows in zip(components, basis, strict=True):
        width, levels = component.width, component.levels
        stride = rows.stride(0) if len(rows) > 1 else 0
        sets.append(Set(codes_of(component.bits, width, field), stride, component.trellis))
        tables += [rows, levels, trellis.in_steps(levels, width) if component.trellis else boundaries(levels)]
        field += len(PLANES[component.bits]) + 1
    tables.append(tables[0] if mean is None else mean)
    meta = Sets(tuple(sets), SCALARS.index(scalar), mean is not None)
    return KernelEncoder(encode_tokens, meta, tuple(tables))
