"""Scores alone: the table lookup is the product with decoded keys, and every way is timed."""

import experiments_times
import pytest
import torch

from kvcache_compress.cpu_kernels import build


def test_lookup_is_the_product_with_decoded_keys() -> None:
    query = torch.randn(2, 3, 8)
    codes, radii = torch.randint(5, (2, 4, 7)), torch.rand(2, 4, 7)
    points = torch.nn.functional.normalize(torch.randn(2, 5), dim=0)
    decoded = torch.cat([radii * points[axis][codes] for axis in (0, 1)], 1)  # [H, D, T]
    torch.testing.assert_close(experiments_times.look_up(query, codes, radii, points), query @ decoded)


def test_every_way_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if (problem := build.problem()) is not None:
        pytest.skip(problem)
    monkeypatch.setattr(experiments_times, "KEYS", ("none", "kivi-2bit"))
    result = experiments_times.scores(tokens=[128], queries=[1, 2], turns=1)
    ways = ["float32", "bfloat16", "lookup", "none", "kivi-2bit"]
    assert [(row["way"], row["queries"]) for row in result["rows"]] == [(way, n) for n in (1, 2) for way in ways]
    assert [row["ratio"] for row in result["rows"] if row["way"] == "float32"] == [1, 1]
    assert all(row["microseconds"] > 0 for row in result["rows"])
