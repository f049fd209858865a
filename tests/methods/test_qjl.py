"""QJL: the estimator's theory and outlier channels."""

import math
from typing import Any

import pytest
import torch
from support.method_cases import make_codec, unit_vectors

PAPER = {"scalar": "norm", "center": "off"}
_VALUES = {"method": "kivi", "bits": 2}
CONTRACT = {
    "qjl": {"keys": {"method": "qjl", "center": "on"}, "values": _VALUES},
    "qjl-outliers": {"keys": {"method": "qjl", "sketch_ratio": 4, "outlier_channels": 8, **PAPER}, "values": "none"},
}
KERNEL_PAIRS: dict[str, Any] = {
    "qjl": (("qjl", {"center": "on"}), ("kivi", {"bits": 2, "group_size": 16})),
    "qjl-outliers": (("qjl", {"sketch_ratio": 4, "outlier_channels": 8}), ("turboquant", {"bits": 2})),
    "qjl-gaussian": (("qjl", {"sketch_ratio": 0.625, "sketch": "gaussian"}), ("none", {})),
}
ENCODERS = [
    ("qjl", {}, "keys"),
    ("qjl", {"sketch_ratio": 1.125, "outlier_channels": 8, "sketch": "gaussian"}, "keys"),
    ("qjl", {"sketch_ratio": 3, "outlier_channels": 5, **PAPER}, "keys"),
]


def keys_and_queries(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return unit_vectors(1000, dim), unit_vectors(20, dim, seed=2)


def errors(codec: Any, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    codec.prepare(keys)
    return codec.score(codec.map_query(queries), codec.encode(keys)) - queries @ keys.mT


@pytest.mark.parametrize(("kind", "outliers"), [("orthogonal", 8), ("gaussian", 0)])
def test_unbiased_over_sketches(kind: str, outliers: int) -> None:
    """Lemma 3.2: over 300 sketches the mean error of each product is within five standard errors of zero."""
    generator = torch.Generator().manual_seed(3)
    keys, queries = torch.randn(2, 1, 1, 40, 32, generator=generator).unbind()
    keys[..., :3] *= 8
    found = []
    for seed in range(300):
        options = {"sketch_ratio": 2, "sketch": kind, "outlier_channels": outliers, **PAPER}
        found.append(errors(make_codec("qjl", 32, seed=seed, **options), keys, queries))
    sample = torch.stack(found)
    z = sample.mean(0) / (sample.std(0) / math.sqrt(len(found)))
    assert z.abs().max() < 5
    assert abs(z.std().item() - 1) < 0.15


@pytest.mark.parametrize(("kind", "expected"), [("orthogonal", 0.046), ("gaussian", 0.079)])
def test_error_of_unit_vectors(kind: str, expected: float) -> None:
    """m = 256, d = 128: the standard deviation for Gaussian S is bounded by sqrt(π / 2m) = .0783, see below."""
    found = errors(make_codec("qjl", 128, sketch_ratio=2, sketch=kind, **PAPER), *keys_and_queries(128))
    assert found.std().item() == pytest.approx(expected, rel=0.06)
    assert abs(found.mean().item()) < 0.002


def test_match_keeps_the_length() -> None:
    """A key decodes to its own length, and products have a smaller error than with the paper's norm."""
    keys, queries = keys_and_queries(64)
    ours, papers = make_codec("qjl", 64, center="off"), make_codec("qjl", 64, **PAPER)
    torch.testing.assert_close(ours.decode(ours.encode(keys)).norm(dim=-1), torch.ones(1, 1, 1000), atol=1e-3, rtol=0)
    assert errors(ours, keys, queries).std() < 0.92 * errors(papers, keys, queries).std()


def test_outlier_channels() -> None:
    """The largest channels of each head get their own sketch and no longer determine the error of the others."""
    keys = torch.randn(2, 2, 200, 64, generator=torch.Generator().manual_seed(1))
    loud = [[3, 17, 40, 63], [0, 8, 9, 33]]
    for head in range(2):
        keys[:, head, :, loud[head]] *= 30
    with_, without = (
        make_codec("qjl", 64, heads=2, **options, **PAPER) for options in ({"outlier_channels": 4}, {"equalize": "off"})
    )
    queries = torch.randn(2, 2, 10, 64, generator=torch.Generator().manual_seed(2))
    for head in range(2):
        queries[:, head, :, loud[head]] = 0
    assert errors(with_, keys, queries).std() < 0.2 * errors(without, keys, queries).std()
    outlier_rows = with_.basis[:, with_.components[1].rows]
    for head in range(2):
        assert outlier_rows[head].abs().sum(0).nonzero().flatten().tolist() == loud[head]


def test_silent_outliers_and_zero_keys_stay_finite() -> None:
    """Norms are those of the inliers themselves; a difference of squares could go negative."""
    keys = torch.zeros(1, 1, 40, 64)
    keys[..., :8] = 300.0
    for scalar in ("norm", "match"):
        codec = make_codec("qjl", 64, outlier_channels=8, scalar=scalar, center="off")
        codec.prepare(keys)
        decoded = codec.decode(codec.encode(keys))
        assert decoded.isfinite().all()
        assert decoded[..., 8:].abs().max() == 0
