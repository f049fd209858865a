"""Distortion: its arithmetic with a codec whose error is known, the theory on real codecs, its command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import ROOT
from typer.testing import CliRunner

from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.studies import distortion_measures
from kvcache_compress.eval.studies.distortion_measures import (
    ESTIMATORS,
    estimator_options,
    measure_embeddings,
    measure_random,
)

COMMITTED = ROOT / "benchmarks" / "results" / "distortion.json"


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
    monkeypatch.setattr(distortion_measures, "_codec", lambda *_: Halving())
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5])
    base = torch.stack([angles.cos(), angles.sin()], 1)
    row = measure_embeddings(base, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), [3], seeds=2)[0]
    products = torch.cat([angles.cos(), angles.sin()]).double()
    assert (row.bits, row.stored_bits) == (3, 5.0)
    assert row.mse == pytest.approx(0.25)
    assert row.bias == pytest.approx(-products.mean().item() / 2)
    assert row.product_error == pytest.approx(2 * products.square().mean().item() / 4)
    assert row.least == pytest.approx(-0.5)
    assert row.greatest == pytest.approx(0)
    assert sum(row.density) * 0.5 / len(row.density) == pytest.approx(1, abs=1e-3)
    # Eight pairs in eight ranges: each error is exactly minus half of its product, without spread.
    assert [one.product for one in row.by_product] == pytest.approx(products.sort().values.tolist(), abs=1e-6)
    assert [one.bias for one in row.by_product] == pytest.approx((-products.sort().values / 2).tolist(), abs=1e-6)
    assert all(one.pairs == 1 and one.std == pytest.approx(0, abs=1e-9) for one in row.by_product)


def test_biases_of_the_estimators() -> None:
    """At 2 bits plain norms shrink each product by the mean squared error, 0.117 of it; the others shrink nothing."""
    rows = measure_embeddings(clustered(512, 64, 0), clustered(64, 64, 1), [2], seeds=8)
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
    rows = json.loads(COMMITTED.read_text(encoding="utf-8"))["rows"]
    row = next(row for row in rows if (row["estimator"], row["bits"]) == (name, bits))
    found = measure_random(estimator_options(name, bits), 128, 1024, 4)
    assert found == pytest.approx((row["mse"], row["product_error"], row["product_bias"]), rel=1e-3, abs=1e-6)


def test_arguments() -> None:
    base = clustered(8, 16, 0)
    for bits in ([], [0], [2, 7]):
        with pytest.raises(ValueError, match="whole numbers from 1 to 6"):
            measure_embeddings(base, base, bits)
    with pytest.raises(ValueError, match="seeds=0"):
        measure_embeddings(base, base, [2], seeds=0)
    with pytest.raises(ValueError, match="head_dim=12"):
        measure_embeddings(clustered(8, 12, 0), clustered(8, 12, 1), [2])


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["distortion", *(str(argument) for argument in arguments)])


def test_command(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", clustered(120, 32, 0).numpy())
    given = ["--embeddings", tmp_path / "x.npy", "--base", 100, "--queries", 20, "--rotations", 1]
    done = run(*given, "--bits", 1, "--bits", 3, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "distortion.json").read_text(encoding="utf-8"))
    assert (result["source"], result["dim"], result["base"], result["queries"]) == ("x.npy", 32, 100, 20)
    assert [(row["estimator"], row["bits"]) for row in result["rows"]] == [(n, b) for b in (1, 3) for n in ESTIMATORS]
    assert {"command", "date", "commit", "versions", "hardware"} <= result.keys()
    assert result["versions"]["matplotlib"]
    assert sum(one["pairs"] for one in result["rows"][0]["by_product"]) == 2000
    for name in ("histograms", "bias", "curves"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = run("--embeddings", tmp_path / "none.npy", "--output", tmp_path)
    assert done.exit_code == 1
    assert "no such file" in done.output
    assert run("--output", tmp_path).exit_code == 1
