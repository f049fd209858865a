"""Distortion: its arithmetic with a codec whose error is known, the theory on real codecs, its command."""

import json
from pathlib import Path

import distortion as random_distortion
import numpy as np
import pytest
import torch
from support.paths import ROOT
from typer.testing import CliRunner

from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.studies import distortion
from kvcache_compress.eval.studies.distortion import ESTIMATORS, measure_distortion


class Halving:
    """A codec that decodes every vector to half of it."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def decode(self, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return fields[0] / 2

    def bits_per_number(self) -> float:
        return 5.0


def clustered(count: int, dim: int, seed: int) -> torch.Tensor:
    """Unit vectors with a mean cosine of about a half, as embeddings have."""
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += dim**0.5
    return x / x.norm(dim=1, keepdim=True)


def test_arithmetic_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distortion, "estimator_codec", lambda *_: Halving())
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5])
    base = torch.stack([angles.cos(), angles.sin()], 1)
    row = measure_distortion(base, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), [3], seeds=2)[0]
    products = torch.cat([angles.cos(), angles.sin()]).double()
    assert (row.bits, row.stored_bits) == (3, 5.0)
    assert row.mse == pytest.approx(0.25)
    assert row.bias == pytest.approx(-products.mean().item() / 2)
    assert row.product_error == pytest.approx(2 * products.square().mean().item() / 4)
    assert (row.least, row.greatest) == pytest.approx((-0.5, 0))
    assert sum(row.density) * 0.5 / len(row.density) == pytest.approx(1, abs=1e-3)
    # Eight pairs in eight ranges: each error is exactly minus half of its product, without spread.
    assert [one.product for one in row.by_product] == pytest.approx(products.sort().values.tolist(), abs=1e-6)
    assert [one.bias for one in row.by_product] == pytest.approx((-products.sort().values / 2).tolist(), abs=1e-6)
    assert all(one.pairs == 1 and one.std == pytest.approx(0, abs=1e-9) for one in row.by_product)


def test_biases_of_the_estimators() -> None:
    """At 2 bits plain norms shrink each product by the mean squared error, 0.117 of it; the others shrink nothing."""
    rows = measure_distortion(clustered(512, 64, 0), clustered(64, 64, 1), [2], seeds=8)
    found = {row.estimator: row for row in rows}
    assert list(found) == list(ESTIMATORS)
    for one in found["mse, norm (paper)"].by_product:
        assert one.bias == pytest.approx(-0.117 * one.product, abs=0.01)
    for name in list(ESTIMATORS)[1:]:
        assert abs(found[name].bias) < 0.012
    assert found["mse, norm (paper)"].mse == pytest.approx(0.117, rel=0.06)
    assert found["mse, norm (paper)"].stored_bits == 2 + 16 / 64
    assert found["prod, orthogonal S"].product_error < found["prod, Gaussian S (paper)"].product_error


@pytest.mark.parametrize(("name", "bits"), [("mse, unbiased", 2), ("prod, Gaussian S (paper)", 1)])
def test_random_vectors_give_the_committed_figures(name: str, bits: int) -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "distortion.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in committed if (row["estimator"], row["bits"]) == (name, bits))
    expected = row["mse"], row["product_error"], row["product_bias"]
    assert random_distortion.measure_random(name, bits) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("bits", "seeds", "dim", "named"), [([0], 1, 16, "bits="), ([2], 0, 16, "seeds=0"), ([2], 1, 12, "head_dim=12")]
)
def test_arguments(bits: list[int], seeds: int, dim: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        measure_distortion(clustered(8, dim, 0), clustered(8, dim, 0), bits, seeds=seeds)


def test_command(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", clustered(120, 32, 0).numpy())
    words = ["--embeddings", str(tmp_path / "x.npy"), "--base", "100", "--queries", "20", "--rotations", "1"]
    done = CliRunner().invoke(
        app, ["distortion", *words, "--bits", "1", "--bits", "3", "--output", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "distortion.json").read_text(encoding="utf-8"))
    assert (result["source"], result["dim"], result["base"], result["queries"]) == ("x.npy", 32, 100, 20)
    assert [(row["estimator"], row["bits"]) for row in result["rows"]] == [(n, b) for b in (1, 3) for n in ESTIMATORS]
    assert {"command", "date", "commit", "versions", "hardware"} <= result.keys()
    assert (tmp_path / "out" / "distortion.png").read_bytes().startswith(b"\x89PNG")
