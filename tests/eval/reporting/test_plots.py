"""Plots of a comparison: their content, and labels that do not overlap."""

import builtins
import itertools
from pathlib import Path
from typing import Any

import pytest
from support.comparison_cells import HOSTILE, cell, comparison

from kvcache_compress.eval.reporting import plots
from kvcache_compress.eval.reporting.drawing import (
    Label,
    new_figure,
    place_labels,
    require_matplotlib,
    shortened,
    style,
)
from kvcache_compress.eval.reporting.tables import Table, tables


@pytest.fixture(scope="module")
def table() -> Table:
    return tables(comparison())[0]


def test_every_plot_is_drawn(table: Table, tmp_path: Path) -> None:
    drawn = plots.draw(table)
    assert [plot.kind for plot in drawn] == ["pareto", "pareto", "pareto", "memory", "needle"]
    assert len({plot.name for plot in drawn}) == 5
    for plot in drawn:
        path = plot.png(tmp_path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_pareto_shows_points_and_names_the_front(table: Table) -> None:
    plot = plots.pareto(table, table.columns[0], "packed_bits")
    (ax,) = plot.figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    places = {line.get_gid(): (line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if line.get_gid()}
    assert places == {
        "point-2": (2.5, 0.01),
        "point-3": (4.5, 0.0112),
        "point-4": (4.25, 0.002),
        "point-5": (2.25, 0.04),
    }
    texts = {text.get_text() for text in ax.texts}
    assert {"tq-4", "tq-2", shortened(HOSTILE), "hqq-4"} <= texts
    (stairs,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert list(stairs.get_xdata()) == [2.25, 2.5, 2.5, 4.25, 4.25]
    assert list(stairs.get_ydata()) == [0.04, 0.04, 0.01, 0.01, 0.002]
    assert plot.alt.endswith(f"tq-2: 2.25 bits, 0.0400; {HOSTILE}: 2.50 bits, 0.0100; tq-4: 4.25 bits, 0.0020.")


def test_axis_bears_a_loss_of_zero() -> None:
    (table,) = tables(
        [cell("full", "perplexity", 0.0), cell("tq-4", "perplexity", 0.0), cell("tq-2", "perplexity", 0.1)]
    )
    plot = plots.pareto(table, table.columns[0], "packed_bits")
    assert plot.figure.axes[0].get_yscale() == "symlog"
    (table,) = tables([cell("full", "perplexity", 0.0), cell("tq-4", "perplexity", 0.0)])
    assert len(plots.pareto(table, table.columns[0], "packed_bits").figure.axes[0].texts) == 1


def test_axis_of_scores_is_linear_and_of_differences_nearly() -> None:
    cells = [cell("full", "needle", 0.9), cell("tq-4", "needle", 0.8), cell("tq-2", "needle", 0.4)]
    for given, scale in ((cells, "symlog"), (cells[1:], "linear")):
        (table,) = tables(given)
        assert plots.pareto(table, table.columns[0], "packed_bits").figure.axes[0].get_yscale() == scale


def test_memory_curves_by_hand(table: Table) -> None:
    curves = plots.memory_curves(table)
    # wiki's prompts have 1024 tokens, but the record's bytes are those of 1000; the needle's have 1000 and 2000.
    assert curves[1] == {1000: 16_000, 1024: 16_000, 2000: 32_000}
    assert curves[5] == {1000: 6_000, 1024: 6_000, 2000: 12_000}
    assert curves[2] == {1024: 20_000}
    (alone,) = tables([cell("full", "perplexity", 0.0)])
    assert plots.memory_plots(alone) == []


def test_needle_grids_by_hand() -> None:
    records = [
        {"tokens": 10, "total_bytes": 1, "length": 10, "depth": depth, "score": score}
        for depth, score in ((0.0, 1.0), (0.0, 0.5), (1.0, 0.25))
    ]
    (table,) = tables([cell("tq-4", "needle", 0.5, records=records), cell("hqq-4", "needle", "failed")])
    ((row, grid),) = plots.needle_grids(table, table.columns[0])
    assert row.cache == "tq-4"
    assert grid == {(10, 0.0): 0.75, (10, 1.0): 0.25}
    assert plots.needle_scale([(row, grid)]) == 1
    assert plots.needle_scale([(row, {(10, 0.0): 62.0})]) == 100


def test_needle_maps_that_do_not_fill_their_rows(tmp_path: Path) -> None:
    records = [{"id": "1", "tokens": 10, "length": 10, "depth": 0.5, "score": 1.0}]
    cells = [cell(f"tq-{number}", "needle", 0.5, records=records) for number in range(7)]
    (table,) = tables(cells)
    assert plots.needle_plot(table, table.columns[0]).png(tmp_path).stat().st_size > 10_000


def test_svg_stands_alone(table: Table) -> None:
    plot = plots.pareto(table, table.columns[0], "packed_bits")
    svg = plot.svg()
    assert svg.startswith('<svg role="img" aria-label="')
    assert "http" not in svg
    assert "<script" not in svg
    assert "var(--ink)" in svg
    assert "#1b1f24" not in svg
    assert f'<g id="{plot.name}-point-4"><title>tq-4: 4.25 bits, 0.0020</title>' in svg
    assert svg == plots.pareto(table, table.columns[0], "packed_bits").svg()


def test_labels_do_not_overlap() -> None:
    labels = [Label(x / 4, y / 4, f"name {x}{y}", (x + y) % 2 == 0) for x in range(5) for y in range(5)]
    with style():
        figure, ax = new_figure(6, 5)
        ax.set_xlim(-1, 2)
        ax.set_ylim(-1, 2)
        place_labels(figure, ax, labels, line=[(0, 0), (0, 1)], upwards=True)
        boxes = [text.get_window_extent() for text in ax.texts]
    needed = {label.text for label in labels if label.needed}
    assert needed <= {text.get_text() for text in ax.texts}
    assert not any(one.shrunk(0.98, 0.98).overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_long_names_are_shortened() -> None:
    assert shortened("abc", 3) == "abc"
    assert shortened("abcdefghij", 5) == "ab…ij"


def test_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"kvcache-compress\[eval\]"):
        require_matplotlib()
