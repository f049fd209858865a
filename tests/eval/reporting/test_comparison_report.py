"""A comparison's tables, Markdown and CSV against numbers computed by hand, and the command that writes them."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.comparison_cells import HOSTILE, cell, comparison, write_comparison
from typer.testing import CliRunner

from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.reporting.report import to_csv, to_markdown
from kvcache_compress.eval.reporting.tables import pareto_front, standard_error, tables
from kvcache_compress.eval.runner.cells import Cell


def test_pareto_front_by_hand() -> None:
    # Index 1 is beaten by 0 in loss at equal bits, 3 by 2 in both; 4 equals 2, so neither is better.
    points = [(2.0, 0.5), (2.0, 0.6), (3.0, 0.1), (4.0, 0.2), (3.0, 0.1), (1.0, 9.0)]
    assert pareto_front(points) == {0, 2, 4, 5}
    assert pareto_front([]) == set()


def test_rows_and_columns_are_in_order() -> None:
    (table,) = tables(comparison())
    assert [column.name for column in table.columns] == ["wiki", "a-needle"]  # perplexity leads
    assert [(row.number, row.cache, row.family) for row in table.rows] == [
        (1, "full", "full"),
        (2, HOSTILE, '<script>alert("x")</script>|*量子*'),
        (3, "hqq-4", "hqq"),
        (4, "tq-4", "turboquant"),
        (5, "tq-2", "turboquant"),
    ]


def test_each_model_and_dtype_has_its_table() -> None:
    cells = [cell("full", "perplexity", 0.0, model=model, dtype=dtype) for model, dtype in ["ax", "bx", "ay"]]
    assert [table.title for table in tables(cells)] == ["a (x)", "b (x)", "a (y)"]


def test_points_where_more_is_better() -> None:
    (table,) = tables(comparison())
    points = table.points(table.columns[1], "packed_bits")
    # Differences from 0.75; the failed and the missing cell are no points; both others are on the front.
    assert [(p.row.cache, p.bits, p.value, p.on_front) for p in points] == [
        ("tq-2", 2.25, -0.25, True),
        ("tq-4", 4.25, 0.0, True),
    ]
    (without_full,) = tables([c for c in comparison() if c.cache["name"] != "full"])
    assert [p.value for p in without_full.points(without_full.columns[1], "packed_bits")] == [0.5, 0.75]


def test_markdown_by_hand() -> None:
    lines = to_markdown(comparison()).splitlines()
    assert lines[0] == "## org/model (float32)"
    assert lines[2:9] == [
        "| cache | bits, packed part | bits, whole cache | packed tokens, least | wiki: KL ↓ | a-needle: recall ↑ |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| full | 16.00 | 16.00 | 0 | 0.0000 | 0.750 |",
        '| &lt;script&gt;alert("x")&lt;/script&gt;\\|\\*量子\\* | 2.50 | 20.00 | 900 | 0.0100 | – |',
        "| hqq-4 | 4.50 | 4.50 | 900 | 0.0112 | failed |",
        "| tq-4 | 4.25 | 8.00 | 900 | 0.0020 | 0.750 (±0) |",
        "| tq-2 | 2.25 | 6.00 | 900 | 0.0400 | 0.500 (−0.250 ± 0.000) |",
    ]
    assert lines[10] == "- failed: a-needle, hqq-4: out of memory: tried &lt;b&gt;8 GiB&lt;/b&gt;"


def test_standard_errors_and_other_sources_of_bits_are_shown() -> None:
    cells = [
        cell("full", "perplexity", 0.0, scores={"kl": 0.0, "kl_stderr": 0.0}),
        cell("tq-4", "perplexity", 0.002, scores={"kl": 0.002, "kl_stderr": 0.00051}),
        cell("tq-2", "perplexity", "no such file"),
        cell("tq-2", "needle", 0.5, bits=(2.25, 6.0)),
    ]
    text = to_markdown(cells)
    assert "| 0.0020 ± 0.0005 | – |" in text
    assert "| tq-2 | 2.25 (a-needle) | 6.00 (a-needle) | 900 | failed | 0.500 ± 0.000 |" in text


def sampled(cache: str, scores: list[float], **changes: Any) -> Cell:
    """A cell with one record per score, of the task `a`, and from the fourth on of the task `b`."""
    records = [
        {"id": f"{n}", "tokens": 10, "total_bytes": 1, "length": 10, "depth": 0.5, "score": score}
        | {"task": "a" if n < 3 else "b"}
        for n, score in enumerate(scores)
    ]
    return cell(cache, "needle", changes.pop("score"), records=records, **changes)


def test_standard_error_by_hand() -> None:
    """Paired by sample, tasks with equal weight, whatever the scale of the score."""
    full = sampled("full", [1.0, 0.0, 0.5, 1.0, 1.0], score=(0.5 + 1.0) / 2)
    ours = sampled("tq-4", [0.5, 0.0, 0.5, 1.0, 0.0], score=(1 / 3 + 0.5) / 2)
    # Differences -1/2, 0, 0 (variance 1/12, of 3) and 0, -1 (variance 1/2, of 2); a mean of two tasks.
    assert standard_error(ours, full) == pytest.approx(math.sqrt(1 / 36 + 1 / 4) / 2)
    # Without a reference: 1/2, 0, 1/2 (variance 1/12) and 1, 0 (variance 1/2) give the same here.
    assert standard_error(ours, None) == pytest.approx(math.sqrt(1 / 36 + 1 / 4) / 2)
    per_cent = replace(ours, scores={"recall": 100 * (1 / 3 + 0.5) / 2})
    assert standard_error(per_cent, None) == pytest.approx(100 * math.sqrt(1 / 36 + 1 / 4) / 2)
    assert standard_error(replace(ours, scores={"recall": 0.3}), None) is None, "no mean of its samples"
    assert standard_error(sampled("tq-4", [1.0, 0.5], score=0.75), None) == pytest.approx(0.25)
    assert standard_error(sampled("tq-4", [1.0], score=1.0), None) is None
    assert standard_error(sampled("tq-4", [1.0, 1.0, 1.0, 0.0], score=0.5), None) is None, "one sample of task b"


def test_columns_without_standard_errors_are_among_all_scores_only() -> None:
    cells = [cell("full", "perplexity", 0.0), cell("tq-4", "perplexity", 0.002)]
    cells += [sampled("full", [1.0], score=1.0), sampled("tq-4", [0.5], score=0.5)]
    (table,) = tables(cells)
    assert [column.name for column in table.shown] == ["wiki"]
    text = to_markdown(cells)
    assert "recall" not in text
    assert "Without a standard error, and so only among all scores: a-needle." in text
    assert "recall" in to_csv(cells)


def test_small_standard_errors_do_not_round_to_zero() -> None:
    scores = {"kl": 0.0005, "kl_stderr": 0.00003}
    assert "| 0.0005 ± 3e-05 |" in to_markdown([cell("tq-4", "perplexity", 0.0005, scores=scores)])


def test_equal_failures_are_told_once() -> None:
    cells = [cell(name, "needle", "no hub") for name in ("tq-2", "tq-4")] + [cell("hqq-4", "needle", "other")]
    (table,) = tables(cells)
    # In the order of the rows; without figures these go by family and name.
    assert [(f.caches, f.message) for f in table.failures] == [(["hqq-4"], "other"), (["tq-2", "tq-4"], "no hub")]
    assert table.rows[0].packed_bits is None
    assert "| hqq-4 | – | – | – | failed |" in to_markdown(cells)


def test_cells_of_unlike_runs_are_doubted() -> None:
    (table,) = tables(comparison())
    assert table.doubts == []
    (table,) = tables([cell("full", "needle", 1.0, seed=1), cell("tq-4", "needle", 1.0, samples=3)])
    assert table.doubts == ["a-needle: the cells have different seeds and numbers of samples; run them again"]


def test_cells_of_unlike_versions_are_doubted() -> None:
    """Only versions within one benchmark matter, and not those of a peer that most cells do not use."""
    versions = {"kvcache_compress": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "hqq": None}
    cells = [
        cell("full", "needle", 1.0, versions=versions),
        cell("tq-4", "needle", 1.0, versions=versions | {"torch": "2.12.0", "transformers": "5.17.0"}),
        cell("full", "perplexity", 0.0, versions=versions | {"kvcache_compress": "0.2.0"}),
        cell("hqq-4", "perplexity", 0.1, versions=versions | {"kvcache_compress": "0.2.0", "hqq": "0.2.8"}),
    ]
    (table,) = tables(cells)
    doubt = "a-needle: the cells have different versions of torch and versions of transformers; run them again"
    assert table.doubts == [doubt]
    assert doubt in to_markdown(cells)


def test_what_was_skipped_is_told_once() -> None:
    why = "lengths=8192: 8224 tokens with the answer; allowed at most 2048, the model's positions"
    cells = [cell(name, "needle", 1.0, skipped=[why]) for name in ("full", "tq-4")]
    (table,) = tables([*cells, cell("full", "perplexity", 0.0)])
    assert [note for note in table.notes if "skipped" in note] == [f"a-needle, skipped: {why}"]


def test_csv_parsed_back() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(comparison()))))
    assert len(lines) == 9
    by_place = {(line["cache"], line["benchmark"]): line for line in lines}
    line = by_place["tq-2", "a-needle"]
    assert (line["model"], line["family"], line["lossless"]) == ("org/model", "turboquant", "False")
    figures = (
        "packed_bits",
        "all_bits",
        "packed_tokens",
        "tokens",
        "total_bytes",
        "score",
        "difference",
        "uncertainty",
        "scores.recall",
    )
    # Prompts of 1000, 1000, 2000 and 2000 tokens; 6 * 1500 bytes; 0.5 - 0.75.
    assert [float(line[name]) for name in figures] == [2.25, 6.0, 900, 1500, 9000, 0.5, -0.25, 0.0, 0.5]
    assert (line["scores.kl"], line["scores.other"], line["error"]) == ("", "1.5", "")
    failed = by_place["hqq-4", "a-needle"]
    assert (failed["score"], failed["packed_bits"], failed["error"]) == ("", "", "out of memory: tried <b>8 GiB</b>")
    assert (HOSTILE, "wiki") in by_place
    assert (HOSTILE, "a-needle") not in by_place


def test_command_writes_all_files(tmp_path: Path) -> None:
    write_comparison(tmp_path, [cell("full", "needle", 0.75), cell("tq-4", "needle", 0.5)])
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = [Path(line) for line in done.output.splitlines()]
    assert [path.name for path in written[:3]] == ["report.md", "report.csv", "report.html"]
    assert all(path.stat().st_size > 300 for path in written)
    images = [path for path in written if path.suffix == ".png"]
    assert len(images) == 4  # two kinds of bits, memory, heat maps
    assert all(f"](plots/{path.name})" in written[0].read_text(encoding="utf-8") for path in images)


def test_errors_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        tables([])
    for folder in (tmp_path, tmp_path / "nonesuch"):
        done = CliRunner().invoke(app, ["report", str(folder)])
        assert done.exit_code == 1
        assert "no finished cell" in done.output
    broken = write_comparison(tmp_path, [cell("full", "needle", 0.75)]) / "org-model" / "a-needle" / "full.json"
    broken.write_text("[", encoding="utf-8")
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 1
    assert "full.json: not a cell" in done.output
    assert not (tmp_path / "report.md").exists()
