"""Recursive PolarQuant against its paper (Lemma 2, section 4.1), and the expected error of its levels and bits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_compress.codecs.quantizers import polar_tree
from kvcache_compress.codecs.transforms.rotation import random_rotation
from kvcache_compress.methods.polarquant.codebooks import angle_density, offline_codebook

Make = Callable[..., Any]
NAME = "polarquant_recursive"


def cumulative(level: int, angles: torch.Tensor) -> torch.Tensor:
    """Distribution function of Lemma 2's density by the trapezoid rule, float64."""
    end = 2 * math.pi if level == 1 else math.pi / 2
    grid = torch.linspace(0, end, 20_001, dtype=torch.float64)
    areas = torch.cumulative_trapezoid(angle_density(level, grid), grid)
    assert areas[-1].item() == pytest.approx(1, abs=1e-6), "a density: the lemma's own constant lacks a square"
    place = (angles.double() / end * 20_000).clamp(0, 19_999)
    low = place.floor().long()
    whole = torch.cat([torch.zeros(1, dtype=torch.float64), areas])
    return torch.lerp(whole[low], whole[low + 1], place - low)


def kolmogorov_smirnov(level: int, angles: torch.Tensor) -> float:
    """√n times the largest distance of the angles' distribution function from Lemma 2's."""
    n = len(angles)
    expected = cumulative(level, angles.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return float(distance) * math.sqrt(n)


CRITICAL = 1.95
"""Largest √n D at a significance of .001 (Kolmogorov distribution's tail 2 exp(-2 x²)); seven levels are tested."""


def test_lemma_2() -> None:
    """Angles of one lopsided vector under the rotations of 60 codecs follow the lemma's density of their level."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.3, 3, 128)
    order = polar_tree.adjacent_order(128, 7)
    rotated = torch.stack([(random_rotation(128, seed) @ x)[order] for seed in range(60)])
    plain = polar_tree.angles(x[order], 7)
    for level, angles in enumerate(polar_tree.angles(rotated, 7), 1):
        assert kolmogorov_smirnov(level, angles.flatten()) < CRITICAL
        without = kolmogorov_smirnov(level, plain[level - 1].flatten().repeat(60))
        assert level > 3 or without > 2 * CRITICAL, "without a rotation they do not"


@pytest.mark.parametrize(("level", "bits"), [(1, 2), (2, 1), (2, 4), (4, 2), (7, 4)])
def test_codebooks_are_centroids(level: int, bits: int) -> None:
    """Each angle is the mean of its cell (equation 4); deeper levels are symmetric about π/4."""
    book = offline_codebook(level, bits)
    if level == 1:
        torch.testing.assert_close(book.angles.diff(), torch.full((2**bits - 1,), 2 * math.pi / 2**bits).double())
        return
    grid = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    weights = angle_density(level, grid)
    cells = torch.bucketize(grid, (book.angles[1:] + book.angles[:-1]) / 2)
    mass = torch.zeros_like(book.angles).index_add(0, cells, weights)
    means = torch.zeros_like(book.angles).index_add(0, cells, weights * grid) / mass
    torch.testing.assert_close(book.angles, means, atol=1e-5, rtol=0)
    torch.testing.assert_close(book.angles + book.angles.flip(0), torch.full_like(book.angles, math.pi / 2))


TABLE = [
    ({"levels": 4, "bits": (4, 2), "radius_bits": 16}, 0.0320),
    ({"bits": (4, 2), "radius_bits": 16}, 0.0351),
    ({"bits": (4, 3, 2), "radius_bits": 16}, 0.0279),
    ({"bits": (4, 2), "radius_bits": 8}, 0.0351),
    ({"bits": (4, 3, 2), "radius_bits": 8}, 0.0279),
]
"""Relative squared error at d = 128, from a simulation that shares no code."""


@pytest.mark.parametrize(("options", "expected"), TABLE, ids=str)
def test_distortion(make_codec: Make, unit_vectors: Make, options: dict[str, Any], expected: float) -> None:
    """Errors are within 2 % of the simulation; 8-bit radii add hardly any."""
    codec = make_codec(NAME, 128, scalar="norm", center="off", **options)
    x = unit_vectors(2000, 128)
    codec.prepare(x)
    assert (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dim", [80, 128])
def test_distortion_where_one_rope_pair_dominates(make_codec: Make, dim: int) -> None:
    """The error is within 15 % of that of vectors without structure, although the tree splits the pair.

    One Hadamard matrix leaves the two channels `(i, i + d/2)`, and so all that they hold, to the deepest angle: four
    times the error.
    """
    x = 0.05 * torch.randn(1, 1, 600, dim, generator=torch.Generator().manual_seed(0))
    for channel in (3, 3 + dim // 2):
        x[..., channel] += torch.randn(600, generator=torch.Generator().manual_seed(channel))

    def error(x: torch.Tensor) -> float:
        total = 0.0
        for seed in range(12):
            codec = make_codec(NAME, dim, seed=seed, center="off")
            codec.prepare(x)
            total += ((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum()).item() / 12
        return total

    plain = torch.randn(1, 1, 600, dim, generator=torch.Generator().manual_seed(1))
    assert error(x) == pytest.approx(error(plain), rel=0.15)


def test_online_codebooks_come_near_offline_ones(make_codec: Make, unit_vectors: Make) -> None:
    """After a rotation k-means finds the same codebooks, at most a few per cent worse."""
    x = unit_vectors(2000, 128)
    options = {"bits": (4, 2), "scalar": "norm", "center": "off"}
    errors = {}
    for codebook in ("offline", "online"):
        codec = make_codec(NAME, 128, codebook=codebook, **options)
        codec.prepare(x)
        errors[codebook] = (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item()
    assert errors["offline"] * 0.99 < errors["online"] < errors["offline"] * 1.05
