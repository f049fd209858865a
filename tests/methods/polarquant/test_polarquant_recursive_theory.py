"""Recursive PolarQuant against its paper (Lemma 2, section 4.1), and the expected error of its levels and bits."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvcache_compress.codecs import polar_tree
from kvcache_compress.codecs.rotation import random_rotation
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


@pytest.fixture(scope="module")
def rotated() -> torch.Tensor:
    """One lopsided vector under the uniform rotations of 60 codecs, `[60, 128]`."""
    x = torch.zeros(128)
    x[:3] = torch.tensor([5.0, -1.0, 0.25])
    order = polar_tree.adjacent_order(128, 7)
    return torch.stack([(random_rotation("haar", 128, seed) @ x)[order] for seed in range(60)])


@pytest.mark.parametrize("level", range(1, 8))
def test_lemma_2(level: int, rotated: torch.Tensor) -> None:
    """All angles of a rotated vector follow the lemma's density of their level, independently of each other."""
    assert kolmogorov_smirnov(level, polar_tree.angles(rotated, 7)[level - 1].flatten()) < CRITICAL


@pytest.mark.parametrize("level", range(1, 8))
def test_lemma_2_after_hadamard_transforms(level: int) -> None:
    """Angles after Hadamard transforms with random signs follow the same density as after a uniform rotation."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.3, 3, 128)
    order = polar_tree.adjacent_order(128, 7)
    rotated = torch.stack([(random_rotation("hadamard", 128, seed) @ x)[order] for seed in range(60)])
    assert kolmogorov_smirnov(level, polar_tree.angles(rotated, 7)[level - 1].flatten()) < CRITICAL
    plain = polar_tree.angles(x[order], 7)[level - 1].flatten()
    assert level > 3 or kolmogorov_smirnov(level, plain.repeat(60)) > 2 * CRITICAL, "without it they do not"


@pytest.mark.parametrize("level", range(1, 8))
def test_lemma_2_on_many_directions(level: int) -> None:
    """3,000 angles of each level, enough to tell it from its neighbour."""
    angles = polar_tree.angles(torch.randn(3000, 128, generator=torch.Generator().manual_seed(level)), 7)[level - 1]
    assert kolmogorov_smirnov(level, angles[:, 0]) < CRITICAL
    assert kolmogorov_smirnov(level + 1, angles[:, 0].clamp(max=math.pi / 2)) > 2 * CRITICAL


def test_deeper_angles_are_sharper() -> None:
    """The angles' standard deviation falls by about √2 per level (Lemma 1: variance of order 1 / d)."""
    grid = torch.linspace(0, math.pi / 2, 20_001, dtype=torch.float64)
    spreads = []
    for level in range(2, 9):
        density = angle_density(level, grid)
        spreads.append(torch.trapezoid(density * (grid - math.pi / 4).square(), grid).sqrt().item())
    ratios = [a / b for a, b in pairwise(spreads)]
    assert all(1.3 < ratio < 1.6 for ratio in ratios)
    assert ratios[-1] == pytest.approx(math.sqrt(2), rel=0.01)


@pytest.mark.parametrize("level", [1, 2, 4, 7])
@pytest.mark.parametrize("bits", [1, 2, 4])
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


@pytest.mark.parametrize("rotation", ["haar", "hadamard"])
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_distortion(make_codec: Make, unit_vectors: Make, row: int, rotation: str) -> None:
    """Errors are within 2 % of the simulation; 8-bit radii add hardly any."""
    options, expected = TABLE[row]
    codec = make_codec(NAME, 128, scalar="norm", center="off", rotation=rotation, **options)
    x = unit_vectors(2000, 128)
    codec.prepare(x)
    assert (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"rotation": "hadamard"}], ids=["default", "hadamard"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_distortion_where_one_rope_pair_dominates(make_codec: Make, dim: int, options: dict[str, Any]) -> None:
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
            codec = make_codec(NAME, dim, seed=seed, center="off", **options)
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


@pytest.mark.parametrize("levels", [4, 7])
def test_scalars(make_codec: Make, levels: int) -> None:
    """Code points have length 1, so the norm keeps lengths; `unbiased` keeps the part along x."""
    x = 3 * torch.randn(1, 1, 300, 128, generator=torch.Generator().manual_seed(2))
    decoded = {}
    for scalar in ("norm", "match", "unbiased", "least_squares"):
        codec = make_codec(NAME, 128, levels=levels, bits=(3,), radius_bits=16, scalar=scalar, center="off")
        decoded[scalar] = codec.decode(codec.encode(x))
    length = x.norm(dim=-1)
    assert torch.equal(decoded["norm"], decoded["match"])
    torch.testing.assert_close(decoded["norm"].norm(dim=-1), length, rtol=1e-3, atol=0)
    torch.testing.assert_close((decoded["unbiased"] * x).sum(-1), length.square(), rtol=1e-3, atol=0)
    error = {scalar: (y - x).square().sum().item() for scalar, y in decoded.items()}
    assert error["least_squares"] < error["norm"] < error["unbiased"]
