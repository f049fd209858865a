"""Report of a comparison as one self-contained HTML file, for wide and narrow, light and dark screens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvcache_compress.eval.runner.cells import Cell

from .answer import recommended, shortlist, summary
from .drawing import Plot
from .plots import Grid, needle_grids, needle_scale, scale_color
from .table_parts import Column, Row
from .tables import FAILED, MISSING, Table

_SMALL_GRID = 6
"""Most columns with which a heat map's squares have room for their number."""


@dataclass(frozen=True)
class HeatMap:
    """A cache's needle scores as rows of squares (text, colour, text colour, description), by depth."""

    row: Row
    mean: str
    lengths: list[str]
    depths: list[tuple[str, list[tuple[str, str, str, str]]]]


def to_html(comparison: Sequence[Table], plots: Sequence[Sequence[Plot]]) -> str:
    """Render the report's page.

    Args:
        comparison: from `tables`.
        plots: of each table, from `draw`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        failed=FAILED,
        missing=MISSING,
        recommended=recommended,
        shortlist=shortlist,
        summary=summary,
        by_length=by_length,
        heat_maps=heat_maps,
        scale=[scale_color(i / 8)[0] for i in range(9)],
    )
    environment.filters.update(svg=lambda plot: Markup(plot.svg()))
    template = environment.get_template("report.html.j2")
    cells = [cell for table in comparison for row in table.rows for cell in row.cells.values()]
    return template.render(
        comparison=list(zip(comparison, plots, strict=True)), circumstances=circumstances(cells), options=options(cells)
    )


def by_length(table: Table, column: Column) -> tuple[list[str], list[tuple[Row, list[str]]]]:
    """Needles found by prompt length, for the caches of the first table: headings, and each row's figures.

    Figures are counts where every sample is found or not, else means with their standard errors.
    """
    grids = {row.number for row, _ in needle_grids(table, column)}
    rows = [row for row in shortlist(table) if row.number in grids]
    scores: dict[int, dict[float, list[float]]] = {row.number: {} for row in rows}
    for row in rows:
        for record in row.cells[column.name].records:
            scores[row.number].setdefault(record["length"], []).append(record["score"])
    lengths = sorted({length for of_row in scores.values() for length in of_row})
    figures = [(row, [_found(scores[row.number].get(length, []), column) for length in lengths]) for row in rows]
    return [_compact(length) for length in lengths], figures


def _found(scores: list[float], column: Column) -> str:
    if not scores:
        return MISSING
    if set(scores) <= {0, 1}:
        return f"{sum(scores):.0f} of {len(scores)}"
    mean = column.text(statistics.fmean(scores))
    if len(scores) < 2:
        return mean
    return f"{mean} ± {column.text(statistics.stdev(scores) / math.sqrt(len(scores)))}"


def heat_maps(table: Table, column: Column) -> list[HeatMap]:
    """The needle benchmark's heat maps, one per cache, all on one scale; empty for other benchmarks."""
    grids = needle_grids(table, column)
    top = needle_scale(grids)
    return [_heat_map(row, grid, column, top) for row, grid in grids]


def circumstances(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Distinct commands, commits, dates, seeds, dtypes, versions and machines of the cells."""
    distinct: dict[str, dict[str, None]] = {}

    def add(name: str, value: Any) -> None:
        if value not in (None, ""):
            distinct.setdefault(name, {})[str(value)] = None

    for cell in cells:
        add("commands", cell.command)
        add("commits", cell.commit)
        add("dates", cell.date[:10])
        add("seeds", cell.seed)
        add("dtypes", cell.dtype)
        add("versions", ", ".join(f"{name} {version}" for name, version in cell.versions.items() if version))
        add("hardware", ", ".join(f"{name}: {value}" for name, value in cell.hardware.items() if value is not None))
    return {name: sorted(values) for name, values in distinct.items()}


def options(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Options of each benchmark that are not None."""
    distinct: dict[str, dict[str, None]] = {}
    for cell in cells:
        set_options = {name: value for name, value in cell.benchmark["options"].items() if value is not None}
        text = ", ".join(f"{name}={value!r}" for name, value in set_options.items())
        distinct.setdefault(f"{cell.benchmark['name']} ({cell.benchmark['kind']})", {})[text] = None
    return {name: sorted(texts) for name, texts in distinct.items()}


def _heat_map(row: Row, grid: Grid, column: Column, top: float) -> HeatMap:
    lengths, depths = (sorted({place[axis] for place in grid}) for axis in (0, 1))

    def square(length: float, depth: float) -> tuple[str, str, str, str]:
        where = f"{length:g} tokens, depth {depth:g}"
        if (length, depth) not in grid:
            return MISSING, "transparent", "inherit", f"{where}: not measured"
        score = grid[length, depth]
        figure = f"{100 * score / top:.0f}" if len(lengths) <= _SMALL_GRID else ""
        return figure, *scale_color(score / top), f"{where}: {column.text(score)}"

    return HeatMap(
        row,
        column.text(statistics.fmean(grid.values())),
        [_compact(length) for length in lengths],
        [(f"{depth:g}", [square(length, depth) for length in lengths]) for depth in depths],
    )


def _compact(length: float) -> str:
    """Format a number of tokens in about four characters: 4096 and 4000 are 4k."""
    if length < 1000:
        return f"{length:g}"
    return f"{length / 1024:g}k" if length % 1024 == 0 else f"{length / 1000:.3g}k"
