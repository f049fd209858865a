"""TurboQuant: centring, channel sets, seeds, and its paper (Theorems 1 and 2, section 4.1)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.method_cases import make_codec, unit_vectors

from kvcache_compress.methods.turboquant.codec import channel_sets


def keys_with_a_mean(share: float, dim: int = 64, heads: int = 2) -> torch.Tensor:
    """Keys `[2, heads, 300, dim]` whose mean holds `share` of their energy."""
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(1, heads, 1, dim, generator=generator)
    mean = mean / mean.norm(dim=-1, keepdim=True) * (share * dim) ** 0.5
    return mean + (1 - share) ** 0.5 * torch.randn(2, heads, 300, dim, generator=generator)


def error(codec: Any, x: torch.Tensor) -> float:
    codec.prepare(x)
    return ((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("bits", [3, 2])
def test_centring(bits: float) -> None:
    """If the mean holds nine tenths of the energy, centring reduces the error to a tenth or less."""
    x = keys_with_a_mean(0.9)
    found = {c: error(make_codec("turboquant", 64, heads=2, bits=bits, center=c), x) for c in ("on", "off", "auto")}
    assert found["on"] < 0.12 * found["off"]
    assert found["auto"] == found["on"]


def test_auto_centring_is_per_head() -> None:
    x = torch.cat([keys_with_a_mean(0.9, heads=1), keys_with_a_mean(0.01, heads=1)], 1)
    codec = make_codec("turboquant", 64, heads=2, bits=3)
    codec.prepare(x)
    assert codec.mean[0].norm() > 1
    assert torch.equal(codec.mean[1], torch.zeros(64))


@pytest.mark.parametrize(
    ("bits", "dim", "fraction", "expected"),
    [
        (4, 128, 0.5, ((128, 4),)), (2.5, 128, 0.25, ((32, 3), (96, 2))), (3.5, 128, 0.5, ((64, 4), (64, 3))),
        (2.5, 64, 0.25, ((16, 3), (48, 2))), (1.5, 80, 0.5, ((40, 2), (40, 1))), (5.5, 16, 0.01, ((8, 6), (8, 5))),
        (5.5, 64, 0.99, ((56, 6), (8, 5))),
    ],
)  # fmt: skip
def test_channel_sets(bits: float, dim: int, fraction: float, expected: tuple[tuple[int, int], ...]) -> None:
    assert channel_sets(bits, dim, fraction) == expected


def test_outliers_get_the_bit_more() -> None:
    x = torch.randn(1, 2, 400, 64, generator=torch.Generator().manual_seed(6))
    loud = torch.tensor([[3, 9, 17, 20, 33, 40, 41, 63], [0, 1, 2, 3, 4, 5, 6, 7]])
    for head in range(2):
        x[:, head, :, loud[head]] *= 6
    options = {"heads": 2, "bits": 2.5, "outlier_fraction": 0.125, "center": "off"}
    codec = make_codec("turboquant", 64, **options)
    codec.prepare(x)
    outlier_rows = codec.basis[:, : codec.sets[0][0]]
    for head in range(2):
        assert outlier_rows[head].abs().sum(0).nonzero().flatten().tolist() == loud[head].tolist()
    assert error(make_codec("turboquant", 64, **options), x) < 0.6 * error(
        make_codec("turboquant", 64, heads=2, bits=2, center="off"), x
    )
    rows = codec.basis
    torch.testing.assert_close(rows @ rows.mT, torch.eye(64).expand(2, -1, -1), atol=1e-5, rtol=0)


def test_seeds() -> None:
    """Same seed, same codes; another seed, side or layer, another rotation - unless it is shared."""
    x = torch.randn(1, 1, 20, 64)
    assert torch.equal(
        make_codec("turboquant", 64, seed=3).encode(x)[0], make_codec("turboquant", 64, seed=3).encode(x)[0]
    )
    bases = [make_codec("turboquant", 64, side, seed=s).basis for side in ("keys", "values") for s in (0, 8)]
    assert all(not torch.equal(a, b) for i, a in enumerate(bases) for b in bases[:i])
    shared = [make_codec("turboquant", 64, side, shared_rotation=True).basis for side in ("keys", "values")]
    assert torch.equal(*shared)


PAPER_MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PAPER_PROD = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}
"""Inner product error times the dimension."""
GAUSSIAN_MSE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Max's classical figures (1960), which the paper rounds: its 0.03 is 0.0345."""


def roundtrip(codec: Any, x: torch.Tensor) -> torch.Tensor:
    codec.prepare(x)
    return codec.decode(codec.encode(x))


def distortion(codec: Any, x: torch.Tensor) -> float:
    return (roundtrip(codec, x) - x).square().sum(-1).mean().item()


def spread(make: Callable[[int], Any], x: torch.Tensor, y: torch.Tensor, seeds: int) -> torch.Tensor:
    """Errors of ⟨y, x⟩ over tokens and seeds, `[seeds, tokens]`."""
    errors = []
    for seed in range(seeds):
        codec = make(seed)
        codec.prepare(x)
        scores = codec.score(codec.map_query(y), codec.encode(x))
        errors.append((scores - y @ x.mT).flatten())
    return torch.stack(errors)


def pair(dim: int, cosine: float, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and `tokens` unit keys, all at the same cosine to it: `[1, 1, 1, dim]`, `[1, 1, tokens, dim]`."""
    generator = torch.Generator().manual_seed(5)
    y = torch.zeros(1, 1, 1, dim)
    y[..., 0] = 1
    side = torch.randn(1, 1, tokens, dim, generator=generator)
    side[..., 0] = 0
    x = cosine * y + math.sqrt(1 - cosine**2) * side / side.norm(dim=-1, keepdim=True)
    return y, x


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("bits", PAPER_MSE)
def test_mse(dim: int, bits: int) -> None:
    """Within the paper's bounds, and near the Gaussian figure, which dimension d misses by a few per cent downwards."""
    options = {"codebook": "lloyd_max", "scalar": "norm", "center": "off"}
    codec = make_codec("turboquant", dim, bits=bits, **options)
    found = distortion(codec, unit_vectors(6000, dim))
    assert found == pytest.approx(GAUSSIAN_MSE[bits], rel={64: 0.05, 128: 0.03}[dim])
    assert found == pytest.approx(PAPER_MSE[bits], abs=0.006, rel=0.05)
    assert 4.0**-bits <= found <= math.sqrt(3) * math.pi / 2 * 4.0**-bits


@pytest.mark.parametrize(("bits", "dim"), [(1, 64), (2, 128), (3, 64), (4, 128)])
def test_prod_inner_product_error(bits: int, dim: int) -> None:
    """Gaussian S as in the paper, random queries and keys: mean squared error times d, within 8 % of the figures."""
    x, y = unit_vectors(1500, dim), unit_vectors(200, dim, seed=2)
    options = {"estimator": "prod", "sketch": "gaussian", "center": "off"}
    errors = spread(lambda seed: make_codec("turboquant", dim, seed=seed, bits=bits, **options), x, y, seeds=4)
    found = errors.square().mean().item() * dim
    expected = math.pi / 2 * {1: 1.0, 2: GAUSSIAN_MSE[1], 3: GAUSSIAN_MSE[2], 4: GAUSSIAN_MSE[3]}[bits]
    assert found == pytest.approx(expected, rel=0.08)
    assert found == pytest.approx(PAPER_PROD[bits], rel=0.2 if bits == 4 else 0.08)
    assert 4.0**-bits <= found <= math.sqrt(3) * math.pi**2 * 4.0**-bits


def test_defaults_per_side() -> None:
    x = unit_vectors(50, 64)
    for side, scalar in (("keys", "match"), ("values", "unbiased")):
        default = make_codec("turboquant", 64, side, bits=2)
        named = make_codec("turboquant", 64, side, bits=2, scalar=scalar)
        assert all(torch.equal(a, b) for a, b in zip(default.encode(x), named.encode(x), strict=True))
    assert make_codec("turboquant", 64, estimator="prod").scalar == "norm"


TABLE = {
    ("mse", "norm"): {2: (0.0298, -0.0581), 3: (0.0184, -0.0170), 4: (0.0101, -0.0047)},
    ("mse", "match"): {2: (0.0264, -0.0294), 3: (0.0138, -0.0078), 4: (0.0069, -0.002)},
    ("mse", "unbiased"): {2: (0.0278, 0.0), 3: (0.0140, 0.0), 4: (0.0069, 0.0)},
    ("prod", "orthogonal"): {2: (0.0385, 0.0), 3: (0.0223, 0.0), 4: (0.0122, 0.0)},
    ("prod", "gaussian"): {2: (0.0649, 0.0), 3: (0.0376, 0.0), 4: (0.0202, 0.0)},
}
"""Standard deviation and bias of the inner product error at d = 128, cosine 0.5; simulations that share no code."""


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", TABLE, ids="-".join)
def test_inner_product_error(kind: tuple[str, str], bits: int) -> None:
    """Standard deviation within 6 % of the simulation, bias within .001; over 40 codecs and 500 keys."""
    estimator, variant = kind
    named = {"scalar": variant} if estimator == "mse" else {"sketch": variant}
    options = {"estimator": estimator, "codebook": "lloyd_max", "bits": bits, "center": "off", **named}
    y, x = pair(128, 0.5, tokens=500)
    errors = spread(lambda seed: make_codec("turboquant", 128, seed=seed, **options), x, y, seeds=40)
    deviation, bias = TABLE[kind][bits]
    assert errors.std().item() == pytest.approx(deviation, rel=0.06)
    noise = 4 * errors.mean(1).std().item() / math.sqrt(40)
    assert errors.mean().item() == pytest.approx(bias, abs=noise + 0.0005)


def test_scalars() -> None:
    """`match` keeps lengths, `unbiased` keeps the part along x, and the plain norm shrinks both."""
    x = torch.randn(1, 1, 500, 64, generator=torch.Generator().manual_seed(3)) * 5
    decoded = {
        scalar: roundtrip(make_codec("turboquant", 64, bits=2, codebook="lloyd_max", scalar=scalar, center="off"), x)
        for scalar in ("norm", "match", "unbiased")
    }
    length = x.norm(dim=-1)
    torch.testing.assert_close(decoded["match"].norm(dim=-1), length, rtol=1e-3, atol=0)
    torch.testing.assert_close((decoded["unbiased"] * x).sum(-1), length.square(), rtol=1e-3, atol=0)
    shrunk = (decoded["norm"].norm(dim=-1) / length).mean().item()
    assert shrunk == pytest.approx((1 - GAUSSIAN_MSE[2]) ** 0.5, rel=0.01), "the plain norm shrinks"


def test_zero_and_huge_vectors() -> None:
    """A zero vector decodes to zero; a length beyond 16 bits is clamped, not infinite."""
    x = torch.zeros(1, 1, 3, 64)
    x[0, 0, 1] = 1e-9
    x[0, 0, 2] = 3e4
    for options in ({}, {"bits": 3.5}, {"estimator": "prod"}, {"scalar": "unbiased"}):
        decoded = roundtrip(make_codec("turboquant", 64, center="off", **options), x)
        assert decoded.isfinite().all(), options
        assert torch.equal(decoded[0, 0, 0], torch.zeros(64)), options
