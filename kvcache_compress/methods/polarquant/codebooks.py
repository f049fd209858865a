"""Angle codebooks of the recursive polar transform (Han et al., Lemma 2 and section 4.1).

Angles of level 1 lie on the circle [0, 2π), deeper ones in [0, π/2]. After a random rotation, level 1 is uniform and
level ℓ ≥ 2 has the density `Γ(m) / (2^(m-2) Γ(m/2)²) sin^(m-1)(2ψ)` with `m = 2^(ℓ-1)`, whatever the data.
"""

import math
from functools import lru_cache

import torch

from kvcache_compress.codecs.device import on_cpu
from kvcache_compress.codecs.quantizers.lloyd_max import interpolated, lloyd
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook

_CELLS = 1 << 15
_ITERATIONS = 30
"""Iterations of k-means; one-dimensional clusters hardly move after that."""
SAMPLES = 1 << 13
"""Most angles per level on which an online codebook is trained."""


def make_codebook(angles: torch.Tensor, circular: bool) -> AngleCodebook:
    """Codebook of these angles, float64 `[n]`; on the circle, cells extend across angle 0."""
    angles = angles.remainder(2 * math.pi).sort().values if circular else angles.sort().values
    bounds = (angles[1:] + angles[:-1]) / 2
    lower = 0
    if circular:
        wrap = (angles[-1] + angles[0] + 2 * math.pi) / 2
        if wrap >= 2 * math.pi:
            # The last code is nearest to angle 0, so it becomes code 0.
            angles, wrap = angles.roll(1), wrap - 2 * math.pi
            bounds = torch.cat([wrap[None], bounds])
        else:
            bounds = torch.cat([bounds, wrap[None]])
        lower = int((bounds < math.pi).sum())
    sides = torch.stack([bounds.cos(), bounds.sin()], -1)
    points = torch.stack([angles.cos(), angles.sin()], -1)
    return AngleCodebook(angles, points.half().float(), (sides if circular else sides.square()).float(), lower)


def angle_density(level: int, angles: torch.Tensor) -> torch.Tensor:
    """Density of a level's angles after a random rotation (Lemma 2), normalised as in its proof."""
    if level == 1:
        return torch.full_like(angles, 1 / (2 * math.pi))
    m = 2 ** (level - 1)
    log_constant = math.lgamma(m) - (m - 2) * math.log(2) - 2 * math.lgamma(m / 2)
    return math.exp(log_constant) * (2 * angles).sin().clamp_min(0).pow(m - 1)


@lru_cache(maxsize=128)
def offline_codebook(level: int, bits: int) -> AngleCodebook:
    """Lloyd-Max codebook of a level's exact density; on the circle evenly spaced, with code 0 at angle 0."""
    count = 2**bits
    if level == 1:
        return make_codebook(2 * math.pi * torch.arange(count, dtype=torch.float64) / count, circular=True)
    step = math.pi / 2 / _CELLS
    middles = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) * step
    cells = angle_density(level, middles) * step
    zero = torch.zeros(1, dtype=torch.float64)
    mass, moment = (torch.cat([zero, part.cumsum(0)]) for part in (cells, cells * middles))
    angles = middles[torch.searchsorted(mass[1:] / mass[-1], (torch.arange(count, dtype=torch.float64) + 0.5) / count)]
    integrals = (lambda edges, sums=sums: interpolated(sums, edges / step) for sums in (mass, moment))
    return make_codebook(lloyd(angles, math.pi / 2, *integrals), circular=False)


@on_cpu()
def online_codebook(angles: torch.Tensor, bits: int, circular: bool, seed: int) -> AngleCodebook:
    """Codebook of angles `[n]` by one-dimensional k-means++ (section 4.1); circular distances cross angle 0."""
    angles, generator = angles.detach().cpu().double(), torch.Generator().manual_seed(seed)
    if len(angles) > SAMPLES:
        angles = angles[torch.randint(len(angles), (SAMPLES,), generator=generator)]
    turn = 2 * math.pi

    def offsets(centre: torch.Tensor) -> torch.Tensor:
        away = angles - centre
        return (away + turn / 2).remainder(turn) - turn / 2 if circular else away

    centres = angles[torch.randint(len(angles), (1,), generator=generator)]
    nearest = offsets(centres).square()
    for _ in range(2**bits - 1):
        weights = nearest if nearest.sum() > 0 else torch.ones_like(nearest)
        chosen = angles[torch.multinomial(weights, 1, generator=generator)]
        centres = torch.cat([centres, chosen])
        nearest = torch.minimum(nearest, offsets(chosen).square())
    for _ in range(_ITERATIONS):
        centres = centres.remainder(turn).sort().values if circular else centres.sort().values
        codes = torch.bucketize(angles, (centres[1:] + centres[:-1]) / 2)
        if circular:
            wrap = (centres[-1] + centres[0] + turn) / 2
            codes = torch.where(angles > wrap, 0, torch.where(angles < wrap - turn, len(centres) - 1, codes))
        sums = torch.zeros_like(centres).index_add(0, codes, offsets(centres[codes]))
        centres = centres + sums / torch.bincount(codes, minlength=len(centres)).clamp_min(1)
    return make_codebook(centres, circular)
