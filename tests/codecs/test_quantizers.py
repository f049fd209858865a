"""Quantizers: codebooks and levels are optimal by independent integration; the best path and the best allocation."""

import itertools
import math
import random
from typing import Any

import pytest
import torch

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.packing import unpack
from kvcache_compress.codecs.quantizers import trellis
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


MSE = {1: 0.292, 2: 0.0832, 3: 0.0226}
SCALAR_MSE = {1: 0.3634, 2: 0.1175, 3: 0.03454}
"""Relative squared errors of Lloyd-Max levels (Max, 1960)."""


def unit_vectors(count: int, width: int, seed: int = 0) -> torch.Tensor:
    z = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return z / z.norm(dim=-1, keepdim=True)


def decoded(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels on the path of least error, in the order of channels."""
    levels = trellis.trellis_levels(z.shape[-1], bits).float()
    *planes, _ = trellis.quantize(z, z.norm(dim=-1), levels, bits, "norm")
    return packing.channel_order(trellis.look_up(tuple(planes), bits, levels))


@pytest.mark.parametrize(("width", "bits"), [(64, 1), (80, 2), (128, 3), (128, 2)])
def test_error(width: int, bits: int) -> None:
    z = unit_vectors(2000, width)
    found = (decoded(z, bits) - z).square().sum(-1).mean().item()
    assert found == pytest.approx(MSE[bits], rel=0.03)
    assert 4.0**-bits < found < 0.82 * SCALAR_MSE[bits]


@pytest.mark.parametrize("bits", MSE)
def test_codes_decode_to_the_levels_of_their_path(bits: int) -> None:
    width = 48
    levels = (trellis.trellis_levels(width, bits) * 4096).round().int()
    z = (unit_vectors(50, width) * 4096).round().int()
    codes, indices = trellis.best_path(z, levels)
    assert codes.max() == 2**bits - 1
    assert torch.equal(trellis.level_indices(codes), indices)


def test_paths_are_the_best_of_those_that_end_alike() -> None:
    """The encoder's path has the least error of all closed paths (16 one-bit codes) that end with the same codes."""
    width, z = 16, unit_vectors(300, 16)
    levels = trellis.trellis_levels(width, 1).float()
    every = (torch.arange(2**width)[:, None] >> torch.arange(width)) & 1
    points = levels[trellis.level_indices(every)]
    ordered = packing.memory_order(z)
    planes = trellis.quantize(z, z.norm(dim=-1), levels, 1, "norm")[:1]
    codes = packing.memory_order(packing.unpack(planes, 1))
    alike = (codes[:, None, -trellis.MEMORY :] == every[:, -trellis.MEMORY :]).all(-1)
    errors = torch.cdist(ordered, points).square()
    found = (trellis.look_up(planes, 1, levels) - ordered).square().sum(-1)
    torch.testing.assert_close(found, errors.where(alike, torch.inf).min(1).values, atol=1e-3, rtol=0)


@pytest.mark.parametrize("bits", MSE)
def test_levels_are_the_means_of_the_numbers_that_they_stand_for(bits: int) -> None:
    """The condition of Lloyd's algorithm, for unit vectors of 128 numbers."""
    width = 128
    levels, z = trellis.trellis_levels(width, bits), unit_vectors(4000, width, seed=1)
    assert torch.equal(levels, -levels.flip(0))
    assert (levels.view(-1, 4).diff(dim=0) > 0).all(), "ascending within each subset"
    steps = trellis.STEPS * math.sqrt(width)
    _, indices = trellis.best_path((z * steps).round().int(), (levels * steps).round().int())
    means = torch.stack([z[indices == i].mean() for i in range(len(levels))])
    torch.testing.assert_close(means * math.sqrt(width), levels.float() * math.sqrt(width), atol=0.02, rtol=0)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_share_loses_less(seed: int) -> None:
    dice = random.Random(seed)
    counts = [dice.randint(1, 4) for _ in range(5)]
    costs = [[dice.randint(1, 40) for _ in range(count)] for count in counts]
    losses = [[dice.random() for _ in range(count)] for count in counts]
    budget = dice.randint(sum(map(min, costs)), 150)

    def total(chosen: Any, numbers: list[list[Any]]) -> Any:
        return sum(of_unit[number] for of_unit, number in zip(numbers, chosen, strict=True))

    fitting = [x for x in itertools.product(*map(range, counts)) if total(x, costs) <= budget]
    found = allocate(costs, losses, budget)
    assert total(found, costs) <= budget
    assert total(found, losses) == pytest.approx(min(total(x, losses) for x in fitting))


def test_a_budget_below_the_cheapest_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget=3: the cheapest choices cost 4"):
        allocate([[2, 5], [2]], [[1, 0], [1]], 3)
