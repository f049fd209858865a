"""QJL's encoder: signs and scale of each sketch of a key, in one launch (Definition 3.1).

g = sign(S k),  c = ‖k‖ times a constant (`norm`), or ‖k‖ / ‖Sᵀ g‖ (`match`)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, next_power_of_2

from .turboquant import rotated

MAX_DIM = 256
"""Largest head dimension: wider tiles would spill registers and exceed shared memory."""
MAX_NUMBERS = 8192
"""Numbers of a sketch's rows that are read at a time: 32 KiB of shared memory."""


class Sketch(NamedTuple):
    """Constants of a sketch: its signs, made `padded` words at a time, its first row, and the constant of its scale."""

    codes: Codes
    start: int
    constant: float


class Sketches(NamedTuple):
    """All sketches of a key. `stride`: numbers between the rows of two heads, 0 if they share them."""

    padded: int
    stride: int
    centred: bool
    weighted: bool
    match: bool
    parts: tuple[Sketch, ...]


@triton.jit
def encode_sketch(tile, p_rows, p_mean, D: tl.constexpr, META: tl.constexpr, AT: tl.constexpr, PRECISION: tl.constexpr):
    """Store the signs `g` of tokens in sketch `AT`; for `match`, return the products `Sᵀ g`, `[T, padded]`."""
    SKETCH: tl.constexpr = META.parts[AT]
    CODES: tl.constexpr = SKETCH.codes
    COUNT: tl.constexpr = CODES.padded
    D_PAD: tl.constexpr = META.padded
    T: tl.constexpr = tile.o_x.shape[0]
    o_c, o_d = tl.arange(0, 8 * COUNT), tl.arange(0, D_PAD)
    b_point = tl.zeros([T, D_PAD], tl.float32)
    for first in tl.range(0, CODES.words, COUNT, num_stages=1):
        o_w = first + o_c % COUNT
        m_r = o_w < CODES.words
        o_r = o_c // COUNT * CODES.words + o_w
        b_z = rotated(tile, p_rows, o_r, m_r, p_mean, D, META.centred, PRECISION)
        b_codes = (b_z > 0).to(tl.int32)
        store_codes(tl.reshape(b_codes, [T, 8, COUNT]), tile, CODES, first)
        if META.match:
            m_rows = m_r[:, None] & (o_d < D)[None, :]
            b_rows = tl.load(p_rows + o_r[:, None] * D + o_d[None, :], mask=m_rows, other=0.0)
            b_point = tl.dot((2 * b_codes - 1).to(tl.float32), b_rows, b_point, input_precision=PRECISION)
    return b_point


@triton.jit
def encode_signs(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode one sketch after the other: signs g = sign(S k) and scale c (Definition 3.1).

    `tables` are all rows `[H or 1, rows, D]`, the mean `[H, D]`, and, with `META.weighted`, each sketch's channel
    weights `[H, D]`, zero for channels of other sketches; rows include these weights.
    """
    p_mean = tile.tables[1] + tile.i_h * D
    o_d = tl.arange(0, META.padded)
    m_x = tile.m_t[:, None] & (o_d < D)[None, :]
    for i in tl.static_range(len(META.parts)):
        p_rows = tile.tables[0] + tile.i_h * META.stride + META.parts[i].start * D
        b_point = encode_sketch(tile, p_rows, p_mean, D, META, i, PRECISION)
        b_x = tl.load(tile.p_x + tile.o_x[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        if META.centred:
            b_x -= tl.load(p_mean + o_d, mask=o_d < D, other=0.0)[None, :]
        if META.weighted:
            b_weights = tl.load(tile.tables[2 + i] + tile.i_h * D + o_d, mask=o_d < D, other=0.0)
            b_x *= b_weights[None, :]
            b_point *= tl.where(b_weights > 0, 1 / b_weights, 0.0)[None, :]
        b_scale = tl.sqrt_rn(tl.sum(b_x * b_x, 1))
        if META.match:
            b_scale = tl.div_rn(b_scale, tl.maximum(tl.sqrt_rn(tl.sum(b_point * b_point, 1)), 1e-30))
        else:
            b_scale *= META.parts[i].constant
        p_scale = tile.fields[META.parts[i].codes.field + 1]
        tl.store(p_scale + tile.o_row, tl.minimum(b_scale, 65504.0).to(tl.float16), mask=tile.m_t)


def qjl_encoder(
    rows: torch.Tensor, sketches: Sequence[tuple[int, float]], match: bool, mean: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> KernelEncoder | None:  # fmt: skip
    """Encoder of keys less their `mean` `[H, D]`, if any; None if a token would spill registers.

    rows: of all sketches, one after the other, `[H or 1, W, D]`.
    sketches: number of rows of each, and the constant of its scale.
    match: True if scales match the keys' norms, and constants are not used.
    weights: each sketch's channel weights `[sketches, H, D]`, or None.
    """
    if rows.shape[2] > MAX_DIM:
        return None
    padded = max(16, next_power_of_2(rows.shape[2]))
    parts, start = [], 0
    for field, (count, constant) in enumerate(sketches):
        codes = codes_of(1, count, 2 * field)
        at_once = min(codes.padded, MAX_NUMBERS // (8 * padded))
        parts.append(Sketch(codes._replace(padded=at_once), start, constant))
        start += count
    stride = rows.stride(0) if len(rows) > 1 else 0
    meta = Sketches(padded, stride, mean is not None, weights is not None, match, tuple(parts))
    tables = (rows, rows if mean is None else mean, *(() if weights is None else weights))
    return KernelEncoder(encode_signs, meta, tables)
