"""Recursive PolarQuant against its paper (Lemma 2, section 4.1), and the expected error of its levels and bits."""

import math
from typing import Any

import pytest
import torch
from support.method_cases import make_codec, unit_vectors

from kvcache_compress.methods.polarquant.codebooks import angle_density, offline_codebook

NAME = "polarquant_recursive"


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
def test_distortion(options: dict[str, Any], expected: float) -> None:
    """Errors are within 2 % of the simulation; 8-bit radii add hardly any."""
    codec = make_codec(NAME, 128, scalar="norm", center="off", **options)
    x = unit_vectors(2000, 128)
    codec.prepare(x)
    assert (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item() == pytest.approx(expected, rel=0.02)


def test_online_codebooks_come_near_offline_ones() -> None:
    """After a rotation k-means finds the same codebooks, at most a few per cent worse."""
    x = unit_vectors(2000, 128)
    options = {"bits": (4, 2), "scalar": "norm", "center": "off"}
    errors = {}
    for codebook in ("offline", "online"):
        codec = make_codec(NAME, 128, codebook=codebook, **options)
        codec.prepare(x)
        errors[codebook] = (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item()
    assert errors["offline"] * 0.99 < errors["online"] < errors["offline"] * 1.05
