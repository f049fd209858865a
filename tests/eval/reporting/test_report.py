"""Tables and reports of a comparison whose figures can be computed by hand."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support.comparison_cells import HOSTILE, cell, comparison
from typer.testing import CliRunner

from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.eval.reporting.plots import plot_pareto
from kvcache_compress.eval.reporting.report import to_html, write_report
from kvcache_compress.eval.reporting.tables import MAX_KL, Table, standard_error, tables
from kvcache_compress.eval.runner.table import Cell, ResultTable


@pytest.fixture
def table() -> Table:
    return tables(comparison())[0]


def test_rows_columns_and_texts(table: Table) -> None:
    wiki, needle = table.columns
    assert (wiki.name, needle.name) == ("wiki", "a-needle"), "perplexity leads"
    lines = {line[0]: line[1:] for line in table.lines()}
    assert list(lines) == ["cache", "full", "hqq-4", "tq-4", HOSTILE, "tq-2"], "by falling bits"
    assert lines["full"] == ["16.00", "16.00", "0", "0.0000", "0.750"]
    assert lines["tq-4"] == ["4.25", "8.00", "900", "0.0020", "0.750 (±0)"]
    assert lines["tq-2"][-1] == "0.500 (−0.250 ± 0.000)"
    assert (lines["hqq-4"][-1], lines[HOSTILE][-1]) == ("failed", "–")
    assert {row.cache: row.family for row in table.rows} == {
        "full": "full", "hqq-4": "hqq", "tq-4": "turboquant", "tq-2": "turboquant", HOSTILE: HOSTILE.partition("-")[0],
    }  # fmt: skip
    assert table.difference(table.rows[0], needle) is None


def test_front_and_smallest_good_cache(table: Table) -> None:
    """The smallest cache whose KL is within the bound, or whose score is within a share of the full one's."""
    wiki, needle = table.columns
    assert [row.cache for row in table.front(wiki)] == ["tq-2", HOSTILE, "tq-4"]
    assert table.smallest is not None
    assert (table.smallest.cache, table.bound(wiki)) == (HOSTILE, MAX_KL)
    assert "tq-2" not in (row.cache for row in table.rows if (table.loss(row, wiki) or 0) <= MAX_KL)
    (alone,) = tables([one for one in comparison() if one.benchmark["kind"] == "needle"])
    assert alone.bound(needle) == pytest.approx(0.05 * 0.75)
    assert alone.smallest is not None
    assert alone.smallest.cache == "tq-4"
    (nothing,) = tables(
        [one for one in comparison() if not one.cache["lossless"] and one.benchmark["kind"] == "needle"]
    )
    assert (nothing.bound(needle), nothing.smallest) == (None, None)


def test_notes_name_failures_and_cells_that_do_not_compare(table: Table) -> None:
    assert any("tried <b>8 GiB</b>" in note and "hqq-4" in note for note in table.notes())
    other = cell("new", "perplexity", 0.1, seed=3, samples=9)
    changed = " ".join(tables([*comparison(), other])[0].notes())
    assert "wiki: cells differ in seeds and numbers of samples" in changed
    assert "cells differ" not in " ".join(table.notes())


def records(values: dict[str, float], name: str = "score", **more: Any) -> list[dict[str, Any]]:
    return [{"id": key, name: value, "tokens": 1, **more} for key, value in values.items()]


def test_standard_errors_compare_sample_by_sample() -> None:
    full = dataclasses.replace(cell("full", "needle", 0.5), records=records({"a": 0.0, "b": 1.0, "c": 0.5}))
    other = dataclasses.replace(cell("tq-4", "needle", 0.4), records=records({"a": 0.0, "b": 0.7, "c": 0.5}))
    assert standard_error(other, full) == pytest.approx(math.sqrt(0.03 / 3))
    assert standard_error(other, None) == pytest.approx(math.sqrt(0.13 / 3))
    (shown,) = tables([full, other])
    assert shown.uncertainty(shown.rows[1], shown.columns[0]) == pytest.approx(0.1)
    percent = [dataclasses.replace(one, scores={"recall": 100 * (one.score or 0)}) for one in (other, full)]
    assert standard_error(*percent) == pytest.approx(10)
    for unknown in (
        dataclasses.replace(other, records=other.records[:1], scores={"recall": 0.0}),
        dataclasses.replace(other, scores={"recall": 0.9}),
    ):
        assert standard_error(unknown, full) is None


def test_tasks_are_averaged_before_their_errors() -> None:
    mixed = records({"a": 0.0, "b": 1.0}, task="x") + records({"c": 0.2, "d": 0.4}, task="y")
    one = dataclasses.replace(cell("tq-4", "needle", 0.4), records=mixed)
    assert standard_error(one, None) == pytest.approx(math.sqrt(0.5 / 2 + 0.02 / 2) / 2)


def test_names_and_messages_are_escaped(table: Table) -> None:
    page = to_html([table], [])
    assert "<script>" not in page
    assert "<b>8 GiB" not in page
    assert all(url.startswith("data:") for url in re.findall(r'(?:src|href)="([^"]*)"', page))


def test_plots_are_drawn_where_there_are_data(table: Table, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    assert plot_pareto(table, table.columns[0], image)
    assert image.read_bytes().startswith(b"\x89PNG")
    (full,) = tables([cell("full", "perplexity", 0.0)])
    assert not plot_pareto(full, full.columns[0], image)


def test_report_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    second: list[Cell] = [dataclasses.replace(one, model="other/model") for one in comparison()]
    ResultTable(path).write([*comparison(), *second])
    ran = CliRunner().invoke(app, ["report", str(path)])
    assert ran.exit_code == 0, ran.output
    written = [Path(line) for line in ran.output.splitlines()]
    assert [one.suffix for one in written] == [".html", *[".png"] * 4]
    assert written == write_report(path)
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert all(text in page for text in ("other/model", "kvcache-compress eval compare a.yaml", "abc123", "A &amp; B"))
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none.jsonl")]).exit_code == 1
