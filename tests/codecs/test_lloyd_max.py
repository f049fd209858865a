"""Codebooks: known values, symmetry, and optimality by an independent integration."""

import math

import pytest
import torch

from kvcache_compress.codecs.packing import unpack
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.codecs.quantizers.scalar import boundaries, quantize


def density(dim: int, points: int = 400_001) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid on [-1, 1] and weights of a coordinate's density, normalised numerically, independent of the code."""
    reach = min(1.0, 16 / math.sqrt(dim))
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    weight = (1 - x.square()).clamp_min(0).pow((dim - 3) / 2)
    return x, weight / weight.sum()


@pytest.mark.parametrize(("bits", "step"), [(2, 0.9957), (3, 0.586), (4, 0.3352)])
def test_uniform_steps(bits: int, step: float) -> None:
    levels = uniform_levels(100_000, bits) * math.sqrt(100_000)
    steps = levels.diff()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps))
    assert steps[0].item() == pytest.approx(step, abs=3e-4)


@pytest.mark.parametrize(("dim", "bits"), [(3, 1), (3, 4), (16, 2), (24, 6), (64, 3), (64, 5), (128, 1), (128, 4)])
def test_levels_are_centroids(dim: int, bits: int) -> None:
    """Each level is the mean of its cell (integrated here anew); with nearest-level cells that is optimal."""
    levels = lloyd_max_levels(dim, bits)
    assert (levels.shape, levels.dtype) == ((2**bits,), torch.float64)
    torch.testing.assert_close(levels, -levels.flip(0))
    x, weight = density(dim)
    cell = torch.bucketize(x, boundaries(levels))
    mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, weight)
    moment = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, weight * x)
    torch.testing.assert_close(moment / mass, levels, atol=2e-4 / math.sqrt(dim), rtol=0)


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
