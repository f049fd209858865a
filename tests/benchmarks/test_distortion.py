"""Distortion of TurboQuant's estimators on random vectors."""

import json

import distortion
import pytest
from support.paths import ROOT


@pytest.mark.parametrize(("name", "bits"), [("mse, unbiased", 2), ("prod, Gaussian S (paper)", 1)])
def test_random_vectors_give_the_committed_figures(name: str, bits: int) -> None:
    committed = json.loads((ROOT / "benchmarks" / "results" / "distortion.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in committed if (row["estimator"], row["bits"]) == (name, bits))
    expected = row["mse"], row["product_error"], row["product_bias"]
    assert distortion.measure_random(name, bits) == pytest.approx(expected, rel=1e-3, abs=1e-6)
