"""A comparison as one HTML file that needs no script and no other file, for wide and narrow, light and dark screens."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvcache_compress.eval.runner.cells import Cell

from .answer import recommended, summary
from .drawing import Plot
from .plots import Grid, needle_grids, needle_scale, scale_color
from .table_parts import Column, Row
from .tables import FAILED, MISSING, Table

_SMALL_GRID = 6
"""Columns up to which a heat map's squares have room for their figure."""


@dataclass(frozen=True)
class HeatMap:
    """A cache's needle scores as rows of squares (figure or None, colour, text colour, description), by depth."""

    row: Row
    mean: str
    lengths: list[str]
    depths: list[tuple[str, list[tuple[str, str, str, str]]]]


def to_html(comparison: Sequence[Table], plots: Sequence[Sequence[Plot]]) -> str:
    """The page.

    Args:
        comparison: see `tables`.
        plots: of each table, see `draw`.
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
        summary=summary,
        heat_maps=heat_maps,
        scale=[scale_color(i / 8)[0] for i in range(9)],
    )
    environment.filters.update(svg=lambda plot: Markup(plot.svg()))
    template = environment.get_template("report.html.j2")
    cells = [cell for table in comparison for row in table.rows for cell in row.cells.values()]
    return template.render(
        comparison=list(zip(comparison, plots, strict=True)), circumstances=circumstances(cells), options=options(cells)
    )


def heat_maps(table: Table, column: Column) -> list[HeatMap]:
    """The needle benchmark's heat maps, one per cache, all on one scale; empty for other benchmarks."""
    grids = needle_grids(table, column)
    top = needle_scale(grids)
    return [_heat_map(row, grid, column, top) for row, grid in grids]


def circumstances(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """How and where the cells were measured: each different value once."""
    found: dict[str, dict[str, None]] = {}

    def add(name: str, value: Any) -> None:
        if value not in (None, ""):
            found.setdefault(name, {})[str(value)] = None

    for cell in cells:
        add("commands", cell.command)
        add("commits", cell.commit)
        add("dates", cell.date[:10])
        add("seeds", cell.seed)
        add("dtypes", cell.dtype)
        add("versions", ", ".join(f"{name} {version}" for name, version in cell.versions.items() if version))
        add("hardware", ", ".join(f"{name}: {value}" for name, value in cell.hardware.items() if value is not None))
    return {name: sorted(values) for name, values in found.items()}


def options(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Each benchmark's options, as far as they are set."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells:
        given = {name: value for name, value in cell.benchmark["options"].items() if value is not None}
        text = ", ".join(f"{name}={value!r}" for name, value in given.items())
        found.setdefault(f"{cell.benchmark['name']} ({cell.benchmark['kind']})", {})[text] = None
    return {name: sorted(texts) for name, texts in found.items()}


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
    """A number of tokens in four characters or so: 4096 and 4000 are 4k."""
    if length < 1000:
        return f"{length:g}"
    return f"{length / 1024:g}k" if length % 1024 == 0 else f"{length / 1000:.3g}k"
