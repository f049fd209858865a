"""Rotations and sketches: orthogonal, seeded and uniform."""

import math

import pytest
import torch
from support.method_cases import make_codec

from kvcache_compress.codecs.quantizers.sketch import sketch_constant, sketch_matrix
from kvcache_compress.codecs.transforms.rotation import haar, random_rotation


@pytest.mark.parametrize("dim", [8, 40, 80, 112, 128])
def test_orthogonal(dim: int) -> None:
    matrix = random_rotation(dim, seed=3)
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dim", [64, 80])
def test_seeds(dim: int) -> None:
    torch.manual_seed(1)
    one = random_rotation(dim, seed=5)
    torch.manual_seed(2)
    assert torch.equal(random_rotation(dim, seed=5), one)
    assert not torch.equal(random_rotation(dim, seed=6), one)


def test_seeds_of_codecs_are_unrelated() -> None:
    """Seeds of layers and sides are unrelated; consecutive ones would repeat the layers or sides of other seeds."""
    seeds = [0, 1, 2, 3, 7, 8, 16]
    parts = ["rotation 0", "rotation 1", "sketch 0"]
    found = [
        make_codec("none", 64, side, seed, layer=layer).context.seed_of(part, shared)
        for seed in seeds
        for part in parts
        for shared, layers, sides in ((True, [0], ["keys"]), (False, range(40), ["keys", "values"]))
        for layer in layers
        for side in sides
    ]
    assert len(set(found)) == len(found)
    nearby = {seed + offset for seed in found for offset in range(1, 8)}
    assert not nearby & set(found), "nor are they shifts of each other"


def test_haar_is_uniform() -> None:
    """Without the sign fix of QR the diagonal would be biased; entries have mean 0 and variance 1/d."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.stack([haar(8, generator) for _ in range(4000)])
    entry = math.sqrt(1 / 8 / 4000)
    assert (samples.mean(0).abs() < 5 * entry).all()
    assert samples.square().mean(0).sub(1 / 8).abs().max() < 0.02
    determinants = torch.linalg.det(samples)
    assert 0.45 < (determinants > 0).double().mean() < 0.55


@pytest.mark.parametrize(("dim", "rows"), [(8, 40), (16, 16), (64, 96), (128, 256)])
def test_sketch_constants(dim: int, rows: int) -> None:
    """√(π/2) / m for Gaussian S; for rows of √d Haar, 1 / (m √d E|u₁|) on the sphere, here by Monte Carlo."""
    assert sketch_constant("gaussian", dim, rows) == pytest.approx(math.sqrt(math.pi / 2) / rows)
    x = torch.randn(200_000, dim, generator=torch.Generator().manual_seed(0))
    mean = (x[:, 0] / x.norm(dim=1)).abs().mean().item()
    assert sketch_constant("orthogonal", dim, rows) == pytest.approx(1 / (rows * math.sqrt(dim) * mean), rel=0.006)
    ratio = sketch_constant("orthogonal", dim, rows) / sketch_constant("gaussian", dim, rows)
    assert ratio == pytest.approx(1 - 1 / (4 * dim), abs=0.1 / dim**1.5), "a quarter over d below the Gaussian one"


def test_sketch_matrices() -> None:
    """Blocks of d rows are rotations times √d; the square sketch is the first block."""
    whole = sketch_matrix("orthogonal", 16, 5, 40)
    assert torch.equal(whole[:16], sketch_matrix("orthogonal", 16, 5))
    for block in whole.split(16):
        torch.testing.assert_close(block @ block.T, 16 * torch.eye(len(block)), atol=1e-4, rtol=0)
    assert not torch.equal(whole[:16], whole[16:32])
    gaussian = sketch_matrix("gaussian", 128, seed=1)
    assert abs(gaussian.mean()) < 0.03
    assert gaussian.var() == pytest.approx(1, abs=0.05)
    assert torch.equal(gaussian, sketch_matrix("gaussian", 128, seed=1))
    assert not torch.equal(gaussian, sketch_matrix("gaussian", 128, seed=2))
