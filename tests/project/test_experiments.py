"""`docs/dev/experiments.md`: its tables are those of the result files, and what it says of them holds."""

import json
import statistics
from typing import Any

import experiments
import pytest


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((experiments.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def test_tables_are_those_of_the_result_files() -> None:
    page = experiments.PAGE.read_text(encoding="utf-8")
    assert experiments.rendered() == page, "run: python benchmarks/experiments.py page"


def test_prefix_code_is_the_best_one() -> None:
    """Probabilities of powers of two are coded in their entropy; equal thirds in 1, 2 and 2 bits."""
    assert experiments.prefix_code_bits([0.5, 0.25, 0.125, 0.125]) == 1.75
    assert experiments.prefix_code_bits([1 / 3] * 3) == pytest.approx(5 / 3)


def test_claims_about_codes_and_angles_hold() -> None:
    codes = {row["bits"]: row for row in rows("codes")}
    assert 0.03 < 1 - codes[4]["prefix_code"] / 4 < 0.06
    assert all(row["entropy"] <= row["prefix_code"] <= row["bits"] for row in codes.values())
    mean = {(row["level"], row["preconditioned"]): statistics.fmean(row["distance"]) for row in rows("angles")}
    assert all(mean[level, True] < mean[level, False] for level in range(1, experiments.LEVELS + 1))
    assert mean[4, True] < 0.4 * mean[4, False]


def test_prod_loses_more_than_twice_as_much() -> None:
    kl = {(row["sinks"], row["bits"], row["estimator"]): row["kl"] for row in rows("prod")}
    for sinks, _ in experiments.WINDOWS:
        assert all(kl[sinks, bits, "prod"] > 2 * kl[sinks, bits, "mse"] for bits in (3, 4))
