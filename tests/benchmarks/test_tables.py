"""Tables and plots of a comparison whose figures can be computed by hand."""

import dataclasses
from pathlib import Path

import pytest
from pareto import plot_pareto
from support.comparison_cells import cell, comparison
from tables import table_of

from kvcache_compress.cli.evaluate.benchmarks import show
from kvcache_compress.eval.runner.table import difference


def test_rows() -> None:
    table = table_of(comparison())
    assert table.model == "org/model"
    assert [(row.cache, row.family, row.packed_bits, row.all_bits) for row in table.rows] == [
        ("full", "full", 16, 16), ("hqq-4", "hqq", 4.5, 4.5), ("other-3", "other", 2.5, 20),
        ("tq-4", "turboquant", 4.25, 8), ("tq-2", "turboquant", 2.25, 6),
    ]  # fmt: skip
    assert {*table.rows[1].cells} == {"wiki", "a-needle"}
    assert {*table.rows[2].cells} == {"wiki"}


def test_sizes_are_those_of_a_perplexity_benchmark_or_of_what_is_finished() -> None:
    needle, wiki = cell("tq-4", "needle", 0.5, bits=(3, 4)), cell("tq-4", "perplexity", 0.1, bits=(1, 2))
    (row,) = table_of([needle, wiki]).rows
    assert (row.packed_bits, row.all_bits) == (1, 2)
    (row,) = table_of([needle, dataclasses.replace(wiki, error="no memory")]).rows
    assert (row.packed_bits, row.all_bits) == (3, 4)
    (row,) = table_of([dataclasses.replace(wiki, error="no memory")]).rows
    assert row.packed_bits is None


def test_differences_are_paired_by_sample() -> None:
    full, other = (
        dataclasses.replace(cell(name, "needle", 0.5), records=[{"id": key, "score": x} for key, x in scores.items()])
        for name, scores in {"full": {"a": 0.0, "b": 1.0, "c": 0.5}, "tq-4": {"c": 0.5, "b": 0.7, "a": 0.0}}.items()
    )
    assert difference(other, full, "score", 3) == "-0.100 ± 0.100"
    assert difference(dataclasses.replace(other, records=other.records[1:2]), full, "score", 1) == "-0.3"


@pytest.mark.parametrize("scale", [1, 100])
def test_a_difference_is_printed_beside_a_score_in_its_units(scale: int, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell(name, "needle", score) for name, score in {"full": 0.75, "tq-4": 0.5}.items()]
    show([dataclasses.replace(x, scores={"recall": scale * x.scores["recall"]}) for x in cells])
    assert ("recall - full's" in (text := capsys.readouterr().out)) == (scale == 1)
    assert ("-0.250 ± 0.000" in text) == (scale == 1)


def test_the_front_alone_has_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = []
    monkeypatch.setattr("matplotlib.axes.Axes.annotate", lambda axes, text, *_, **__: named.append(text))
    plot_pareto(table_of(comparison()), "wiki", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(named) == ["other-3", "tq-2", "tq-4"], "hqq-4 has more bits and a larger loss than tq-4"
