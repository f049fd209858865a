"""Spectral's encoder: digits and scale of keys in one launch, the twin of `codecs/quantizers/digits.py`.

For a key k at position b of a group whose first token was rotated by R, with the basis E, deviations σ and points p:

    x = R⁻¹ k - places[b] means,  y = E x,  z = y / σ
    error(s) = Σ (y - s σ p)² - (Σ (y - s σ p) σ p)² / Σ (σ p)²,  p nearest to z / s

The scale s with the least error among a few multiples of a token's RMS gives the codes. The second term is what
rescaling these points optimally gains over s. Torch computes energy minus gain, in float64; for a sum of squared errors
float32 suffices. Points are symmetric about zero, so only the positive ones are searched.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.codecs.quantizers.digits import SEARCHED, DigitCodes, Tables
from kvcache_compress.codecs.quantizers.digits import tables as points_on
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, store_codes
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, next_power_of_2

MAX_DIM = 256
"""Largest head dimension: wider tiles would spill registers."""
PAIRS = tl.constexpr(16)
"""Pairs of channels read at a time."""
PIECE = tl.constexpr(32)
"""Channels at a time: they are sorted by their bits, so few pieces need a long search."""
POINTS = tl.constexpr(32)
"""Most positive points of a channel."""
RANK = tl.constexpr(16)
"""Rank of the table of means."""
MOST_DOUBLINGS = tl.constexpr(3)
"""Doublings from a piece to `MAX_DIM`."""
MOST_WORDS = 16
"""Most words of a plane that are packed at a time."""
(ORDER, PLACES, MEANS, ENCODING, DEVIATION, KIND, STEPS, BOUNDS, POINT, CODE, CHANNELS, SHIFTS, FACTORS) = (
    tl.constexpr(place) for place in range(13)
)
"""Indices of the tables."""


class EncodedDigits(NamedTuple):
    """Constants of the encoder.

    rotary: pairs of channels that RoPE rotates; group: tokens with one anchor.
    pieces: number of runs of `PIECE` channels, a power of two; digits: stored per token; tries: scales to search.
    planes: codes of each plane, of which `padded` words are made at a time; first: first digit of each.
    """

    rotary: int
    group: int
    pieces: int
    digits: int
    tries: int
    planes: tuple[Codes, ...]
    first: tuple[int, ...]


@triton.jit
def anchored(tile, o_p, o_a, o_b, m_p, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Load keys, rotated back by their groups' anchors, less the mean: real, imaginary parts, float32 `[T, pairs]`.

    `o_a` and `o_b` are the channels of pairs `o_p`, where `m_p`.
    """
    ROTARY: tl.constexpr = META.rotary
    p_x, m_x = tile.p_x + tile.o_x[:, None], tile.m_t[:, None] & m_p[None, :]
    b_a = tl.load(p_x + o_a[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + o_b[None, :], mask=m_x, other=0.0).to(tl.float32)
    if ROTARY > 0:
        p_cos = tile.p_rope + (tile.o_token // META.group * (2 * ROTARY))[:, None] + o_p[None, :]
        m_r = tile.m_t[:, None] & (o_p < ROTARY)[None, :]
        b_cos = tl.load(p_cos, mask=m_r, other=1.0).to(tl.float32)
        b_sin = tl.load(p_cos + ROTARY, mask=m_r, other=0.0).to(tl.float32)
        b_length = b_cos * b_cos + b_sin * b_sin
        b_real = (b_a * b_cos + b_b * b_sin) / b_length
        b_b = (b_b * b_cos - b_a * b_sin) / b_length
        b_a = b_real
    o_r = tl.arange(0, RANK)
    o_place = (tile.i_h * META.group + tile.o_token % META.group) * RANK
    b_places = tl.load(tile.tables[PLACES] + o_place[:, None] + o_r[None, :], mask=tile.m_t[:, None], other=0.0)
    p_means = tile.tables[MEANS] + (tile.i_h * RANK + o_r)[:, None] * D
    b_a -= tl.dot(b_places, tl.load(p_means + o_a[None, :], mask=m_p[None, :], other=0.0), input_precision=PRECISION)
    b_b -= tl.dot(b_places, tl.load(p_means + o_b[None, :], mask=m_p[None, :], other=0.0), input_precision=PRECISION)
    return b_a, b_b


@triton.jit
def channels(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Spectral channels of keys, float32 `[channels, T]`, zero beyond `D`.

    Tokens come last, so that the lanes of a warp look up points of one channel, which lie in one cache line.
    """
    WIDTH: tl.constexpr = META.pieces * PIECE
    o_c = tl.arange(0, WIDTH)
    p_basis, p_order = tile.tables[ENCODING] + tile.i_h * (D * D), tile.tables[ORDER]
    b_y = tl.zeros([tile.o_x.shape[0], WIDTH], tl.float32)
    for start in tl.range(0, D // 2, PAIRS, num_stages=1):
        o_p = start + tl.arange(0, PAIRS)
        m_p = o_p < D // 2
        o_a = tl.load(p_order + o_p, mask=m_p, other=0)
        o_b = tl.load(p_order + D // 2 + o_p, mask=m_p, other=0)
        b_a, b_b = anchored(tile, o_p, o_a, o_b, m_p, D, META, PRECISION)
        m_e = m_p[:, None] & (o_c < D)[None, :]
        b_rows = tl.load(p_basis + o_a[:, None] * D + o_c[None, :], mask=m_e, other=0.0)
        b_y = tl.dot(b_a, b_rows, b_y, input_precision=PRECISION)
        b_rows = tl.load(p_basis + o_b[:, None] * D + o_c[None, :], mask=m_e, other=0.0)
        b_y = tl.dot(b_b, b_rows, b_y, input_precision=PRECISION)
    return tl.trans(b_y)


@triton.jit
def nearest(b_size, p_bounds, o_kind, depth):
    """Ranks of the positive points nearest to numbers of magnitude `b_size` `[C, T]`, by binary search.

    The bounds between a channel's points, which are at most 2^`depth`, begin at `p_bounds + o_kind` `[C, 1]`.
    """
    b_rank = tl.zeros(b_size.shape, tl.int32)
    for i in range(depth):
        half = 1 << (depth - 1 - i)
        b_rank += tl.where(b_size > tl.load(p_bounds + (o_kind + half - 1 + b_rank)), half, 0)
    return b_rank


@triton.jit
def halves(b_tiles):
    """Split every tile `[C, T]` into the upper and the lower half of its channels."""
    C: tl.constexpr = b_tiles[0].shape[0] // 2
    T: tl.constexpr = b_tiles[0].shape[1]
    b_halves = ()
    for i in tl.static_range(len(b_tiles)):
        b_low, b_high = tl.split(tl.permute(tl.reshape(b_tiles[i], [2, C, T]), [1, 2, 0]))
        b_halves = b_halves + (b_low, b_high)
    return b_halves


@triton.jit
def stacked(b_tiles):
    """Stack pairs of tiles `[C, T]`, the inverse of `halves`."""
    b_pairs = ()
    for i in tl.static_range(len(b_tiles) // 2):
        b_pair = tl.permute(tl.join(b_tiles[2 * i], b_tiles[2 * i + 1]), [2, 0, 1])
        b_pairs = b_pairs + (tl.reshape(b_pair, [2 * b_pair.shape[1], b_pair.shape[2]]),)
    return b_pairs


@triton.jit
def encode_digits(tile, D: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr):
    """Encode keys: planes of their digits, and the unbiased scale Σ y² / Σ y σ p.

    `tables` are channels by pairs `[D]`; factors of the means `[H, group, RANK]` and `[H, RANK, D]`; the encoding
    `[H, D, D]`; by channel, padded to whole pieces, the deviation and the first of its points in the tables of them;
    the number of channels with bits and the depth of the search in each piece `[H, 1 + pieces]`; bounds, values and
    codes of the positive points `[kinds, POINTS]`; channel and place of each digit `[H, digits]`; scales to try.
    """
    T: tl.constexpr = tile.o_x.shape[0]
    PIECES: tl.constexpr = META.pieces
    WIDTH: tl.constexpr = PIECES * PIECE
    tables, o_head = tile.tables, tile.i_h * WIDTH
    b_y = channels(tile, D, META, PRECISION)
    b_z = b_y / tl.load(tables[DEVIATION] + o_head + tl.arange(0, WIDTH)[:, None])
    p_steps = tables[STEPS] + tile.i_h * (PIECES + 1)
    b_energy = tl.sum(b_y * b_y, 0)
    b_rms = tl.maximum(tl.sqrt(tl.sum(b_z * b_z, 0) / tl.load(p_steps).to(tl.float32)), 1e-12)
    b_pieces = (b_z,)
    for _ in tl.static_range(MOST_DOUBLINGS):
        if len(b_pieces) < PIECES:
            b_pieces = halves(b_pieces)
    b_least = tl.full([T], float("inf"), tl.float32)
    b_step, b_product = b_rms, b_rms
    for i in range(META.tries):
        b_try = b_rms * tl.load(tables[FACTORS] + i)
        b_error = tl.zeros([PIECE, T], tl.float32)
        b_cross, b_square = b_error, b_error
        for j in tl.static_range(PIECES):
            o_c = o_head + j * PIECE + tl.arange(0, PIECE)[:, None]
            o_kind, b_weight = tl.load(tables[KIND] + o_c), tl.load(tables[DEVIATION] + o_c)
            b_size = tl.abs(b_pieces[j])
            b_rank = nearest(b_size * (1 / b_try)[None, :], tables[BOUNDS], o_kind, tl.load(p_steps + 1 + j))
            b_point = tl.load(tables[POINT] + (o_kind + b_rank))
            b_left = (b_size - b_try[None, :] * b_point) * b_weight
            b_point *= b_weight
            b_error += b_left * b_left
            b_cross += b_left * b_point
            b_square += b_point * b_point
        b_gain, b_norm = tl.sum(b_cross, 0), tl.maximum(tl.sum(b_square, 0), 1e-30)
        b_sum = tl.sum(b_error, 0) - b_gain * (b_gain / b_norm)
        m_b = b_sum < b_least
        b_least = tl.where(m_b, b_sum, b_least)
        b_step = tl.where(m_b, b_try, b_step)
        b_product = tl.where(m_b, b_gain + b_try * b_norm, b_product)
    b_scale = tl.minimum(b_energy / tl.maximum(b_product, 1e-30), 65504.0)
    tl.store(tile.fields[len(META.planes)] + tile.o_row, b_scale.to(tl.float16), mask=tile.m_t)
    b_codes = ()
    for i in tl.static_range(PIECES):
        o_kind = tl.load(tables[KIND] + o_head + i * PIECE + tl.arange(0, PIECE)[:, None])
        b_size = tl.abs(b_pieces[i]) * (1 / b_step)[None, :]
        b_rank = nearest(b_size, tables[BOUNDS], o_kind, tl.load(p_steps + 1 + i))
        b_code = tl.load(tables[CODE] + (o_kind + b_rank))
        # A negative point has the opposite digits.
        b_codes = b_codes + (tl.where(b_pieces[i] > 0, b_code, ~b_code),)
    for _ in tl.static_range(MOST_DOUBLINGS):
        if len(b_codes) > 1:
            b_codes = stacked(b_codes)
    for i in tl.static_range(len(META.planes)):
        store_digits(b_codes[0], tile, META, i)


@triton.jit
def store_digits(b_codes, tile, META: tl.constexpr, AT: tl.constexpr):
    """Pack the digits of plane `AT` from the codes of all channels `[channels, T]`."""
    T: tl.constexpr = b_codes.shape[1]
    PLANE: tl.constexpr = META.planes[AT]
    WORDS: tl.constexpr = PLANE.words
    PADDED: tl.constexpr = PLANE.padded
    o_n = tl.arange(0, 8 * PADDED)
    for start in tl.static_range(0, WORDS, PADDED):
        o_w = start + o_n % PADDED
        o_d = tile.i_h * META.digits + META.first[AT] + o_n // PADDED * WORDS + o_w
        b_channel = tl.load(tile.tables[CHANNELS] + o_d, mask=o_w < WORDS, other=0)
        b_shift = tl.load(tile.tables[SHIFTS] + o_d, mask=o_w < WORDS, other=0)
        b_digits = tl.gather(b_codes, tl.broadcast_to(b_channel[:, None], [8 * PADDED, T]), 0)
        b_digits = (b_digits >> b_shift[:, None]) & (2**PLANE.bits - 1)
        store_codes(tl.permute(tl.reshape(b_digits, [8, PADDED, T]), [2, 0, 1]), tile, PLANE, start)


def spectral_encoder(
    context: CodecContext, group: int, digits: DigitCodes, encoding: torch.Tensor, deviation: torch.Tensor,
    means: torch.Tensor, places: torch.Tensor,
) -> KernelEncoder | None:  # fmt: skip
    """Encoder of keys by digits, or None if a token would spill registers.

    group: tokens with one anchor.
    encoding, deviation: keys to their channels, `[H, D, D]`, and the channels' standard deviations, `[H, D]`.
    means, places: factors of the mean key at each place in a group, `[H, RANK, D]` and `[H, group, RANK]`.
    """
    dim, rope, device = context.head_dim, context.rope, context.device
    if dim > MAX_DIM:
        return None
    points = points_on(device)
    widths = [(bits, width) for bits, width in zip((2, 1), digits.counts, strict=True) if width]
    planes = [codes_of(bits, width, field) for field, (bits, width) in enumerate(widths)]
    pieces = next_power_of_2(-(-dim // PIECE.value))
    meta = EncodedDigits(
        rope.rotary if rope else 0, group, pieces, digits.channels.shape[1], len(SEARCHED),
        tuple(codes._replace(padded=min(MOST_WORDS, codes.padded)) for codes in planes),
        first=(0, digits.counts.twos)[-len(planes) :],
    )  # fmt: skip
    order = torch.tensor(rope.order if rope else range(dim), dtype=torch.int32, device=device)
    padding = (0, pieces * PIECE.value - dim)
    kind, deviation = functional.pad(digits.kind.long(), padding), functional.pad(deviation, padding, value=1.0)
    depth = torch.tensor(points.bits, device=device)[kind].unflatten(1, (pieces, -1)).amax(-1) - 1
    coded = (kind > 0).sum(-1, keepdim=True).clamp_min(1)
    steps = torch.cat([coded, depth.clamp_min(0)], 1)
    numbers = (kind * POINTS.value, steps, *_positive(points), digits.channels.long(), digits.shifts.long())
    tables = (
        order, places, means, encoding, deviation,
        *(x.to(torch.int32) if x.dtype == torch.int64 else x for x in numbers),
        torch.tensor(SEARCHED, device=device),
    )  # fmt: skip
    return KernelEncoder(encode_digits, meta, tuple(x.contiguous() for x in tables))


def _positive(points: Tables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decision boundaries, positive points and their codes, by kind of channel, each `[kinds, POINTS]`."""
    kinds = len(points.bits)
    bounds = points.bounds.new_full((kinds, POINTS.value), torch.inf)
    values, codes = points.points.new_zeros(bounds.shape), points.codes.new_zeros(bounds.shape)
    for kind, bits in enumerate(points.bits):
        if bits == 0:
            continue  # its point is zero
        half = 2 ** (bits - 1)
        bounds[kind, : half - 1] = points.bounds[kind, half : 2 * half - 1]
        values[kind, :half] = points.points[kind, half : 2 * half]
        codes[kind, :half] = points.codes[kind, half : 2 * half]
    return bounds, values, codes
