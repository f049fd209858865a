"""Trellis-coded quantization: paths, their errors, and the levels."""

import math

import pytest
import torch

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.quantizers import trellis

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
