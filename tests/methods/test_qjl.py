"""QJL: the estimator's theory, outlier channels, and what is stored."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache_compress import load_config

Make = Callable[..., Any]
PAPER = {"scalar": "norm", "center": "off"}
_VALUES = {"method": "kivi", "bits": 2}
CONTRACT = {
    "qjl": {"keys": {"method": "qjl", "center": "on"}, "values": _VALUES},
    "qjl-outliers": {"keys": {"method": "qjl", "sketch_ratio": 4, "outlier_channels": 8, **PAPER}, "values": "none"},
}
KERNEL_PAIRS: dict[str, Any] = {
    "qjl": (("qjl", {"center": "on"}), ("kivi", {"bits": 2, "group_size": 16})),
    "qjl-outliers": (
        ("qjl", {"sketch_ratio": 4, "outlier_channels": 8, "outlier_sketch_dim": 40}),
        ("turboquant", {"bits": 2}),
    ),
    "qjl-gaussian-40": (("qjl", {"sketch_dim": 40, "sketch": "gaussian"}), ("none", {})),
}
ENCODERS = [
    ("qjl", {}, "keys"),
    ("qjl", {"sketch_dim": 72, "outlier_channels": 8, "sketch": "gaussian"}, "keys"),
    ("qjl", {"sketch_ratio": 3, "outlier_channels": 5, **PAPER}, "keys"),
]


def keys_and_queries(make_unit: Make, dim: int, queries: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return make_unit(1000, dim), make_unit(queries, dim, seed=2)


def errors(codec: Any, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    codec.prepare(keys)
    return codec.score(codec.map_query(queries), codec.encode(keys)) - queries @ keys.mT


@pytest.mark.parametrize(("kind", "outliers"), [("orthogonal", 8), ("gaussian", 0)])
def test_unbiased_over_sketches(make_codec: Make, kind: str, outliers: int) -> None:
    """Lemma 3.2: over 300 sketches the mean error of each product is within five standard errors of zero."""
    generator = torch.Generator().manual_seed(3)
    keys, queries = torch.randn(2, 1, 1, 40, 32, generator=generator).unbind()
    keys[..., :3] *= 8
    found = []
    for seed in range(300):
        options = {"sketch_dim": 64, "sketch": kind, "outlier_channels": outliers, "outlier_sketch_dim": 32, **PAPER}
        found.append(errors(make_codec("qjl", 32, seed=seed, **options), keys, queries))
    sample = torch.stack(found)
    z = sample.mean(0) / (sample.std(0) / math.sqrt(len(found)))
    assert z.abs().max() < 5
    assert abs(z.std().item() - 1) < 0.15


@pytest.mark.parametrize(("kind", "expected"), [("orthogonal", 0.046), ("gaussian", 0.079)])
def test_error_of_unit_vectors(make_codec: Make, unit_vectors: Make, kind: str, expected: float) -> None:
    """m = 256, d = 128: the standard deviation for Gaussian S is bounded by sqrt(π / 2m) = .0783, see below."""
    found = errors(make_codec("qjl", 128, sketch_dim=256, sketch=kind, **PAPER), *keys_and_queries(unit_vectors, 128))
    assert found.std().item() == pytest.approx(expected, rel=0.06)
    assert abs(found.mean().item()) < 0.002


@pytest.mark.parametrize(("outliers", "cosine"), [(0, 0.0), (0, 0.9), (8, 0.5)])
def test_variance_bound_and_tail(make_codec: Make, cosine: float, outliers: int) -> None:
    """Gaussian S of m rows: variance (π/2 ‖q‖²‖k‖² - (q·k)²)/m, below (π/2m)‖q‖²‖k‖², and Bernstein's tail.

    With outliers each sketch has its own m and its own parts of q and k, and variances add up. Lemma 3.5 has
    exp(-3/4 m ε² / (1 + ε)), less than a variance of π/2m allows at small ε; see docs/methods/qjl.md.
    """
    rows, dim, sketches = (128, 64), 64, 1500
    generator = torch.Generator().manual_seed(4)
    key, query = torch.zeros(2, 1, 1, 1, dim).unbind()
    bounds, products = [], []
    for part, length in ((slice(outliers, dim), 3.0), (slice(0, outliers), 20.0))[: 2 if outliers else 1]:
        k, other = torch.randn(2, dim, generator=generator)[:, part].sign().unbind()
        other = other - (other @ k) / (k @ k) * k
        key[..., part] = length * k / k.norm()
        query[..., part] = 2 / length * (cosine * k / k.norm() + math.sqrt(1 - cosine**2) * other / other.norm())
        products.append((query[..., part] @ key[..., part].mT).item())
        bounds.append((query[..., part].norm() * key[..., part].norm()).item())
    options = {"sketch": "gaussian", "outlier_channels": outliers, **PAPER}
    options |= {"sketch_dim": rows[0], "outlier_sketch_dim": rows[1]}
    codecs = (make_codec("qjl", dim, seed=seed, **options) for seed in range(sketches))
    found = torch.cat([errors(codec, key, query).view(1) for codec in codecs])
    parts = list(zip(bounds, products, rows, strict=False))
    expected = sum((math.pi / 2 * bound**2 - product**2) / m for bound, product, m in parts)
    most = sum(math.pi / 2 * bound**2 / m for bound, _, m in parts)
    assert found.var().item() == pytest.approx(expected, rel=0.15)
    assert found.var().item() <= most * (1 + 4 * math.sqrt(2 / sketches))
    for epsilon in (0.4, 0.6, 0.8):
        slack = 4 / 3 * epsilon * max(bound / m for bound, _, m in parts)
        assert (found.abs() > epsilon).float().mean() <= 2 * math.exp(-(epsilon**2) / (2 * most + slack))


def test_match_keeps_the_length(make_codec: Make, unit_vectors: Make) -> None:
    """A key decodes to its own length, and products have a smaller error than with the paper's norm."""
    keys, queries = keys_and_queries(unit_vectors, 64)
    ours, papers = make_codec("qjl", 64, center="off"), make_codec("qjl", 64, **PAPER)
    torch.testing.assert_close(ours.decode(ours.encode(keys)).norm(dim=-1), torch.ones(1, 1, 1000), atol=1e-3, rtol=0)
    assert errors(ours, keys, queries).std() < 0.92 * errors(papers, keys, queries).std()


def test_outlier_channels(make_codec: Make) -> None:
    """The largest channels of each head get their own sketch and no longer determine the error of the others."""
    keys = torch.randn(2, 2, 200, 64, generator=torch.Generator().manual_seed(1))
    loud = [[3, 17, 40, 63], [0, 8, 9, 33]]
    for head in range(2):
        keys[:, head, :, loud[head]] *= 30
    with_, without = (
        make_codec("qjl", 64, heads=2, **options, **PAPER)
        for options in ({"outlier_channels": 4, "outlier_sketch_dim": 8}, {"equalize": "off"})
    )
    queries = torch.randn(2, 2, 10, 64, generator=torch.Generator().manual_seed(2))
    for head in range(2):
        queries[:, head, :, loud[head]] = 0
    assert errors(with_, keys, queries).std() < 0.2 * errors(without, keys, queries).std()
    outlier_rows = with_.basis[:, with_.sketches[1].span]
    for head in range(2):
        assert outlier_rows[head].abs().sum(0).nonzero().flatten().tolist() == loud[head]


def test_silent_outliers_and_zero_keys_stay_finite(make_codec: Make) -> None:
    """Norms are those of the inliers themselves; a difference of squares could go negative."""
    keys = torch.zeros(1, 1, 40, 64)
    keys[..., :8] = 300.0
    for scalar in ("norm", "match"):
        codec = make_codec("qjl", 64, outlier_channels=8, scalar=scalar, center="off")
        codec.prepare(keys)
        decoded = codec.decode(codec.encode(keys))
        assert decoded.isfinite().all()
        assert decoded[..., 8:].abs().max() == 0


@pytest.mark.parametrize(("dim", "rows"), [(128, 256), (80, 160), (96, 40)])
def test_storage(make_codec: Make, dim: int, rows: int) -> None:
    """A compression of 16 d / (m + 16), and with outliers 16 + m' bits more."""
    codec = make_codec("qjl", dim, sketch_dim=rows)
    assert 16 / codec.bits_per_number() == pytest.approx(16 * dim / (rows + 16))
    keys = torch.randn(1, 1, 32, dim)
    codec.prepare(keys)
    assert 8 * sum(field.nbytes for field in codec.encode(keys)) == 32 * (rows + 16)
    with_outliers = make_codec("qjl", dim, sketch_dim=rows, outlier_channels=8, outlier_sketch_dim=64)
    assert with_outliers.bits_per_number() * dim == rows + 16 + 64 + 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sketch_dim": 100}, r"sketch_dim\n.*input_value=100"),
        ({"sketch_dim": 264}, "sketch_dim=264 "),
        ({"outlier_channels": 8, "outlier_sketch_dim": 512}, "outlier_sketch_dim=512 "),
        ({"sketch_ratio": 5}, r"sketch_ratio\n.*input_value=5"),
        ({"outlier_channels": 2}, "outlier_channels=2 "),
        ({"outlier_channels": 64}, "outlier_channels=64 "),
    ],
)
def test_refused(make_codec: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_codec("qjl", 64, **options)
    with pytest.raises(ValueError, match="qjl for values"):
        make_codec("qjl", 64, "values")


def test_paper_preset() -> None:
    """Public defaults: m = 256 of 128 channels, 512 in the first 15 of 32 layers, 2-bit values, a window of 128."""
    config = load_config("qjl-paper")
    plans = config.plan(["full_attention"] * 32)
    assert [plan.keys.options().sketch_ratio for plan in plans] == [4] * 15 + [2] * 17
    assert {plan.keys.options().outlier_channels for plan in plans} == {8}
    assert (config.sink_tokens, config.recent_tokens) == (0, 128)
    values = plans[0].values.options()
    assert (plans[0].values.method, values.bits, values.group_size) == ("kivi", 2, 32)
