"""The script that measures a cache's share of a prompt, with a smaller layer."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from support.paths import ROOT

from kvcache_compress.bench.layers import Shape


@pytest.fixture
def script() -> dict[str, Any]:
    functions = runpy.run_path(str(ROOT / "benchmarks" / "studies" / "prefill_share.py"))
    functions["one_layer"].__globals__.update(SHAPE=Shape(4, 2, 64), MLP=64)
    return functions


def test_rows_are_of_the_full_cache(script: dict[str, Any]) -> None:
    """The cache's share is less than the complete prompt, and larger for a compressed cache than for the full one."""
    with torch.inference_mode():
        full, *ours = script["rows"](script["one_layer"](), ["turboquant-4bit", "commvq-2bit"], 1024, 2)
    assert [row["cache"] for row in ours] == ["turboquant-4bit", "commvq-2bit"]
    assert full["ratio"] == 1
    for row in (full, *ours):
        assert 0 < row["update_seconds"] < row["seconds"]
        assert row["share"] >= full["share"]
