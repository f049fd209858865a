"""Codebooks: known values, symmetry, and optimality by an independent integration."""

import math

import pytest
import torch

from kvcache_compress.codecs.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.codecs.packing import unpack
from kvcache_compress.codecs.scalar import boundaries, quantize


def density(dim: int, points: int = 400_001) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid on [-1, 1] and weights of a coordinate's density, normalised numerically, independent of the code."""
    reach = min(1.0, 16 / math.sqrt(dim))
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    weight = (1 - x.square()).clamp_min(0).pow((dim - 3) / 2)
    return x, weight / weight.sum()


def loss(levels: torch.Tensor, dim: int) -> float:
    """Mean squared error of the nearest level."""
    x, weight = density(dim)
    nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
    return (weight * (x - nearest).square()).sum().item()


GAUSSIAN = {1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520]}
"""Positive levels of the optimal quantizer of a unit normal (Max, 1960)."""


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_large_dimensions_are_gaussian(bits: int) -> None:
    levels = lloyd_max_levels(100_000, bits) * math.sqrt(100_000)
    assert levels.tolist() == pytest.approx([-v for v in GAUSSIAN[bits][::-1]] + GAUSSIAN[bits], abs=2e-4)


@pytest.mark.parametrize(("bits", "step"), [(2, 0.9957), (3, 0.586), (4, 0.3352)])
def test_uniform_steps(bits: int, step: float) -> None:
    levels = uniform_levels(100_000, bits) * math.sqrt(100_000)
    steps = levels.diff()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert steps[0].item() == pytest.approx(step, abs=3e-4)


@pytest.mark.parametrize("dim", [3, 16, 24, 64, 128])
@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_are_centroids(dim: int, bits: int) -> None:
    """Each level is the mean of its cell (integrated here anew); with nearest-level cells that is optimal."""
    levels = lloyd_max_levels(dim, bits)
    x, weight = density(dim)
    cell = torch.bucketize(x, boundaries(levels))
    mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, weight)
    moment = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, weight * x)
    torch.testing.assert_close(moment / mass, levels, atol=2e-4 / math.sqrt(dim), rtol=0)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_samples_agree(dim: int) -> None:
    """Levels agree with Monte Carlo: coordinates of random unit vectors, cell means within 4 standard errors."""
    z = torch.randn(20_000, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = (z / z.norm(dim=1, keepdim=True)).flatten()
    levels = lloyd_max_levels(dim, 3)
    cell = torch.bucketize(z, boundaries(levels))
    for index, level in enumerate(levels):
        inside = z[cell == index]
        assert abs(inside.mean() - level) < 4 * inside.std() / math.sqrt(len(inside))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [32, 128])
def test_no_neighbour_is_better(bits: int, dim: int) -> None:
    """Moved or scaled levels are worse for both codebooks, and the Lloyd-Max levels beat the uniform ones."""
    best = loss(lloyd_max_levels(dim, bits), dim)
    for factor in (0.97, 1.03):
        assert loss(lloyd_max_levels(dim, bits) * factor, dim) > best
        assert loss(uniform_levels(dim, bits) * factor, dim) > loss(uniform_levels(dim, bits), dim)
    moved = lloyd_max_levels(dim, bits).clone()
    moved[0] *= 1.03
    assert loss(moved, dim) > best
    assert best <= loss(uniform_levels(dim, bits), dim) + 1e-12


@pytest.mark.parametrize(("bits", "mse"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_distortion(bits: int, mse: float) -> None:
    """The distortion of a coordinate, times the dimension, is near Max's figures for a normal variable."""
    assert 2000 * loss(lloyd_max_levels(2000, bits), 2000) == pytest.approx(mse, rel=3e-3)


@pytest.mark.parametrize("codebook", [lloyd_max_levels, uniform_levels])
def test_shape(codebook: object) -> None:
    for dim in (16, 40, 64, 128):
        for bits in range(1, 7):
            levels = codebook(dim, bits)  # type: ignore[operator]
            assert levels.shape == (2**bits,)
            assert levels.dtype == torch.float64
            assert (levels.diff() > 0).all()
            torch.testing.assert_close(levels, -levels.flip(0))
            assert levels.abs().max() < 1


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_counted_outwards(bits: int) -> None:
    """Magnitudes ascend in both halves, and codes of reordered levels decode to the same numbers."""
    levels = lloyd_max_levels(64, bits).float()
    turned = outward(levels)
    negative, positive = turned.chunk(2)
    torch.testing.assert_close(negative, -positive, atol=1e-7, rtol=0)
    assert (positive.diff() > 0).all()
    assert torch.equal(outward(turned), levels)
    assert torch.equal(boundaries(turned), boundaries(levels))
    z = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) / 8
    ascending, counted = (quantize(z, z.norm(dim=-1), order, bits, "unbiased") for order in (levels, turned))
    assert torch.equal(turned[unpack(counted[:-1], bits)], levels[unpack(ascending[:-1], bits)])
    assert torch.equal(counted[-1], ascending[-1])
    counted = quantize(z, z.norm(dim=-1), turned, bits, "norm")
    nearest = (z[..., None] - turned).abs().argmin(-1)
    assert torch.equal(unpack(counted[:-1], bits), nearest)


def test_too_small_a_dimension() -> None:
    with pytest.raises(ValueError, match="dim=2 for a Lloyd-Max codebook: at least 3"):
        lloyd_max_levels(2, 2)
