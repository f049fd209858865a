"""Rotations and sketches: orthogonal, seeded, and uniform where they say so."""

import math

import pytest
import torch

from kvcache_compress.polar_codebooks import online_codebook
from kvcache_compress.rotation import haar, random_rotation
from kvcache_compress.sketch import sketch_constant, sketch_matrix


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 80, 96, 112, 128, 256])
def test_orthogonal(kind: str, dim: int) -> None:
    matrix = random_rotation(kind, dim, seed=3)
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("dim", [64, 80])
def test_seeds(kind: str, dim: int) -> None:
    """Determined by the seed alone, whatever the global generator does."""
    torch.manual_seed(1)
    one = random_rotation(kind, dim, seed=5)
    torch.manual_seed(2)
    assert torch.equal(random_rotation(kind, dim, seed=5), one)
    assert not torch.equal(random_rotation(kind, dim, seed=6), one)


@pytest.mark.parametrize("dim", [64, 128])
def test_hadamard_spreads_every_channel(dim: int) -> None:
    """All entries are ±1/√d: a single large channel ends up in all coordinates alike."""
    matrix = random_rotation("hadamard", dim, seed=0)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, dim**-0.5))


@pytest.mark.parametrize("dim", [80, 96, 112])
def test_other_sizes_mix_between_blocks(dim: int) -> None:
    """Two block transforms with a permutation between: a channel reaches well beyond its own block."""
    matrix = random_rotation("hadamard", dim, seed=0)
    block = dim & -dim
    reached = (matrix.abs() > 1e-9).sum(0)
    assert (reached > block).float().mean() > 0.9


def test_haar_is_uniform() -> None:
    """Without the sign fix of QR the diagonal would be biased; entries have mean 0 and variance 1/d."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.stack([haar(8, generator) for _ in range(4000)])
    entry = math.sqrt(1 / 8 / 4000)
    assert (samples.mean(0).abs() < 5 * entry).all()
    assert samples.square().mean(0).sub(1 / 8).abs().max() < 0.02
    determinants = torch.linalg.det(samples)
    assert 0.45 < (determinants > 0).double().mean() < 0.55


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_sketch_constants(dim: int) -> None:
    """√(π/2) / d for Gaussian S; for S = √d Haar the mean of |u₁| on the sphere, here by Monte Carlo within 0.3 %."""
    assert sketch_constant("gaussian", dim) == pytest.approx(math.sqrt(math.pi / 2) / dim)
    x = torch.randn(200_000, dim, generator=torch.Generator().manual_seed(0))
    mean = (x[:, 0] / x.norm(dim=1)).abs().mean().item()
    assert sketch_constant("orthogonal", dim) == pytest.approx(1 / (dim * math.sqrt(dim) * mean), rel=0.006)
    ratio = sketch_constant("orthogonal", dim) / sketch_constant("gaussian", dim)
    assert ratio == pytest.approx(1 - 1 / (4 * dim), abs=0.1 / dim**1.5), "a quarter over d below the Gaussian one"


def test_sketch_matrices() -> None:
    orthogonal = sketch_matrix("orthogonal", 64, seed=1)
    torch.testing.assert_close(orthogonal @ orthogonal.T, 64 * torch.eye(64), atol=1e-4, rtol=0)
    gaussian = sketch_matrix("gaussian", 128, seed=1)
    assert abs(gaussian.mean()) < 0.03
    assert gaussian.var() == pytest.approx(1, abs=0.05)
    assert torch.equal(gaussian, sketch_matrix("gaussian", 128, seed=1))
    assert not torch.equal(gaussian, sketch_matrix("gaussian", 128, seed=2))


def test_numbers_do_not_depend_on_the_default_device() -> None:
    angles = torch.rand(200)
    made = [
        lambda: random_rotation("haar", 24, 1),
        lambda: random_rotation("hadamard", 24, 1),
        lambda: sketch_matrix("gaussian", 24, 1),
        lambda: sketch_matrix("orthogonal", 24, 1),
        lambda: online_codebook(angles, 2, False, 1).angles,
    ]
    for make in made:
        with torch.device("meta"):
            elsewhere = make()
        assert torch.equal(elsewhere, make())
