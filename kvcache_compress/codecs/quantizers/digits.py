"""Codes of spectral channels as weighted sums of 2-bit and 1-bit digits.

A channel of b bits is a sum `Σ w_i · level(digit_i)`. The levels of a 2-bit digit are those of a Gaussian's Lloyd-Max
quantizer, the levels of a 1-bit digit are ±1. The weights minimise the mean squared error of a standard Gaussian.
Compared with a Lloyd-Max quantizer of as many bits, such a sum loses nothing at 1 or 2 bits, 2 to 6 % at 3, 4 to 20 %
at 4, and 8 to 27 % at 5 and 6, depending on its digits.

Points are linear in the digits, so the weights go into the query map. Every head stores the same number of digits of
each kind, whichever channels they belong to, and kernels see 2-bit and 1-bit components as in TurboQuant.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from .. import packing
from ..base import Fields
from ..device import on_cpu
from .lloyd_max import lloyd_max_levels
from .scalar import boundaries

MOST_BITS = 6
PAIR_ORDER = ((9, 9, 9), (9, 9, 9), (3, 9, 9), (2, 9, 9), (0, 5, 9), (1, 6, 9), (4, 7, 8))
"""By bits of a channel: the order in which pairs of 1-bit digits replace its 2-bit digits; 9 where it has none."""
SEARCHED = (0.6, 0.75, 0.9, 1.0, 1.15, 1.35, 1.6, 2.0, 2.6, 3.5)
"""Scales tried for each token, in units of its channels' RMS; a single scale would saturate outlying tokens."""
_GAUSSIAN_DIM = 1 << 16
"""Dimension in which a coordinate on the sphere is practically Gaussian."""
WEIGHTS: dict[tuple[int, int], tuple[float, ...]] = {
    (0, 0): (),
    (0, 1): (0.79788,),
    (0, 2): (0.98144, 0.52876),
    (0, 3): (0.98871, 0.74849, 0.45124),
    (0, 4): (1.12729, 0.70797, 0.55604, 0.29570),
    (0, 5): (1.17934, 0.66457, 0.58399, 0.45088, 0.29464),
    (0, 6): (1.01426, 0.86916, 0.66591, 0.48799, 0.30896, 0.25416),
    (1, 0): (1.0,),
    (1, 1): (0.76683, 0.97982),
    (1, 2): (0.56470, 1.12540, 0.70707),
    (1, 3): (0.47644, 0.98337, 0.91365, 0.59495),
    (1, 4): (1.13362, 0.86205, 0.42835, 0.32598, 0.21473),
    (2, 0): (1.03994, 0.75719),
    (2, 1): (0.78534, 0.56115, 1.12054),
    (2, 2): (1.17515, 0.52184, 0.57473, 0.43147),
    (3, 0): (1.09198, 0.76389, 0.53864),
}
"""Weights of a channel's digits by `(n₂, n₁)`, in row n₂ (8 - n₂) + n₁: first of its n₂ 2-bit digits, then of its n₁
1-bit digits."""
DISTORTION = (1.0, 0.36338, 0.11748, 0.03527, 0.00989, 0.00269, 0.00077)
"""Least mean squared error of a standard Gaussian coded with 0 to 6 bits."""


class DigitCounts(NamedTuple):
    """Numbers of 2-bit and 1-bit digits per token and head."""

    twos: int
    ones: int


def digit_counts(bits: float, head_dim: int) -> DigitCounts:
    """Digits for `bits` per number. At least one 1-bit digit per channel, since any channel may have odd bits."""
    total = round(bits * head_dim)
    if total % 8 or abs(total - bits * head_dim) > 1e-3:
        raise ValueError(
            f"bits={bits:g} for spectral must be a multiple of {8 / head_dim:g} for a head dimension of {head_dim}"
        )
    twos = max(0, total - head_dim) // 16 * 8
    return DigitCounts(twos, total - 2 * twos)


def allocate_bits(deviation: torch.Tensor, counts: DigitCounts) -> torch.Tensor:
    """Allocate bits to channels with standard deviations `[H, D]`, greedily: int64 `[H, D]`.

    Each bit goes where it removes most squared error (water-filling).
    """
    error = torch.tensor(DISTORTION, dtype=torch.float64, device=deviation.device)
    removed = deviation.double().square()[..., None] * (error[:-1] - error[1:])
    # Each bit of a channel removes less than the one before it, so the greedy choice takes the largest of all.
    best = removed.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, : 2 * counts.twos + counts.ones]
    bits = torch.zeros_like(deviation, dtype=torch.long)
    return bits.scatter_add_(-1, best // MOST_BITS, torch.ones_like(best))


def split_bits(bits: torch.Tensor, counts: DigitCounts) -> tuple[torch.Tensor, torch.Tensor]:
    """Split each channel's `bits` `[H, D]` into numbers of 2-bit and 1-bit digits, both int64 `[H, D]`.

    A channel of odd bits has one 1-bit digit. The remaining 1-bit digits replace 2-bit digits in pairs, first where a
    pair loses less than the digit that it replaces (`PAIR_ORDER`).
    """
    ones = bits % 2
    order = torch.tensor(PAIR_ORDER, device=bits.device)[bits].flatten(1)
    left = (counts.ones - ones.sum(-1, keepdim=True)) // 2
    rank = order.argsort(dim=-1, stable=True).argsort(-1)
    ones = ones + 2 * (rank < left).unflatten(-1, (-1, MOST_BITS // 2)).sum(-1)
    return (bits - ones) // 2, ones


class DigitCodes(NamedTuple):
    """Digits of a layer's heads, in the order in which they are stored.

    Attributes:
        kind: uint8 `[H, D]`, each channel's row in `tables`.
        channels: int16 `[H, n₂ + n₁]`, channel of each digit, 2-bit digits first.
        shifts: uint8 `[H, n₂ + n₁]`, bit position of each digit in its channel's code.
        weights: float32 `[H, n₂ + n₁]`, factor of each digit's level.
        counts: n₂ and n₁.
    """

    kind: torch.Tensor
    channels: torch.Tensor
    shifts: torch.Tensor
    weights: torch.Tensor
    counts: DigitCounts


def digit_codes(deviation: torch.Tensor, counts: DigitCounts) -> DigitCodes:
    """Allocate digits to channels with standard deviations `[H, D]`."""
    twos, ones = split_bits(allocate_bits(deviation, counts), counts)
    kind, weights = twos * (8 - twos) + ones, _weights(deviation.device)
    place, parts = torch.arange(MOST_BITS, device=deviation.device), []
    for number, earlier, bits in ((twos, torch.zeros_like(twos), 2), (ones, twos, 1)):
        # All heads have as many digits.
        digit = (place < number[..., None]).flatten(1).nonzero()[:, 1].view(len(number), -1)
        channel, i = digit // MOST_BITS, digit % MOST_BITS
        before = earlier.gather(1, channel)
        parts.append((channel, 2 * before + bits * i, weights[kind.gather(1, channel), before + i]))
    channels, shifts, factors = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return DigitCodes(kind.to(torch.uint8), channels.to(torch.int16), shifts.to(torch.uint8), factors, counts)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """`WEIGHTS` as float32 `[kinds, 6]`, padded."""
    with torch.inference_mode(False):
        padded = [[*own, *[0.0] * (MOST_BITS - len(own))] for own in WEIGHTS.values()]
        return torch.tensor(padded, dtype=torch.float32, device=device)


@lru_cache(maxsize=1)
def two_bit_levels() -> torch.Tensor:
    """Levels of a 2-bit digit, float32 `[4]`, exact in float16."""
    return (lloyd_max_levels(_GAUSSIAN_DIM, 2) * math.sqrt(_GAUSSIAN_DIM)).half().float()


class Tables(NamedTuple):
    """Points of every kind of channel in `WEIGHTS`, for unit standard deviation, padded to 64.

    Attributes:
        points: float32 `[kinds, 64]`, ascending.
        bounds: float32 `[kinds, 63]`, midpoints between the points, then infinity.
        codes: int64 `[kinds, 64]`, code of each point: its digits, 2-bit digits in the low bits.
        bits: bits of each kind.
    """

    points: torch.Tensor
    bounds: torch.Tensor
    codes: torch.Tensor
    bits: tuple[int, ...]


@lru_cache(maxsize=8)
@on_cpu()
def tables(device: torch.device) -> Tables:
    """Tables on `device`, made once."""
    with torch.inference_mode(False):  # the cached tables must also work outside of inference mode
        count = 2**MOST_BITS
        points, codes = torch.zeros(len(WEIGHTS), count), torch.zeros(len(WEIGHTS), count, dtype=torch.long)
        bounds = torch.full((len(WEIGHTS), count - 1), torch.inf)
        ones = torch.tensor([-1.0, 1.0])
        for row, ((twos, _), weights) in enumerate(WEIGHTS.items()):
            sums, code, place = torch.zeros(1), torch.zeros(1, dtype=torch.long), 0
            for i, weight in enumerate(weights):
                levels = two_bit_levels() if i < twos else ones
                sums = (sums + weight * levels[:, None]).flatten()
                code = (code + (torch.arange(len(levels)) << place)[:, None]).flatten()
                place += 2 if i < twos else 1
            found, order = sums.sort()
            points[row, : len(found)], codes[row, : len(found)] = found, code[order]
            bounds[row, : len(found) - 1] = boundaries(found)
        bits = tuple(2 * twos + ones for twos, ones in WEIGHTS)
        return Tables(points.to(device), bounds.to(device), codes.to(device), bits)


def quantize(y: torch.Tensor, deviation: torch.Tensor, digits: DigitCodes, tables: Tables) -> Fields:
    """Bit planes of the digits nearest to channels `y` `[B, H, T, D]`, and the unbiased scale, float32 `[B, H, T]`.

    `y` is zero in channels without bits; `deviation` is `[H, D]`. The nearest points are found for every scale in
    `SEARCHED`, in units of the token's RMS over channels with bits, and those with the least error are kept. Sums are
    in float64, so that all back ends break ties alike.
    """
    points, bounds, code_of = (table[digits.kind.long()] for table in tables[:3])
    z, energy = y / deviation[:, None], y.double().square().sum(-1)
    coded = (digits.kind > 0).sum(-1).clamp_min(1)
    rms = (z.double().square().sum(-1) / coded[:, None]).sqrt().float().clamp_min(1e-12)
    best: list[torch.Tensor] = []
    for factor in SEARCHED:
        nearest = _nearest(z / (rms * factor)[..., None], bounds)
        point = (_of_channel(points, nearest) * deviation[:, None]).double()
        product, square = (y.double() * point).sum(-1), point.square().sum(-1).clamp_min(1e-30)
        found = [energy - product.square() / square, energy / product.clamp_min(1e-30), nearest]
        better = found[0] < best[0] if best else torch.ones_like(energy, dtype=torch.bool)
        best = [
            torch.where(better if new.ndim == 3 else better[..., None], new, old)
            for new, old in zip(found, best or found, strict=True)
        ]
    _, scale, nearest = best
    shape = *nearest.shape[:-1], digits.channels.shape[-1]
    channels = digits.channels.long()[:, None].expand(shape)
    codes = _of_channel(code_of, nearest).gather(-1, channels) >> digits.shifts.long()[:, None]
    twos = digits.counts.twos
    planes = packing.pack(codes[..., :twos] & 3, 2) if twos else ()
    return *planes, *packing.pack(codes[..., twos:] & 1, 1), scale.float()


def _nearest(z: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Ranks, int64, of the points nearest to `z` `[B, H, T, D]`; `bounds` `[H, D, 63]` lie between the points."""
    columns = z.permute(1, 3, 0, 2)
    found = torch.searchsorted(bounds, columns.flatten(2).contiguous())
    return found.unflatten(2, columns.shape[2:]).permute(2, 0, 3, 1)


def _of_channel(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look up `index` `[B, H, T, D]` in each channel's row of `table` `[H, D, 64]`."""
    heads, channels = (torch.arange(size, device=index.device) for size in table.shape[:2])
    return table[heads[:, None, None], channels, index]
