"""Tables of a comparison's cells, one per model.

A row is a cache, a column a benchmark with its main score. The first column leads: it decides which caches are on the
front and which are recommended (`answer.py`). A perplexity benchmark leads if there is one, because KL tells caches
apart long before a task's score does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache_compress.eval.runner.cells import Cell

from .table_parts import Column, Failure, Point, Row

VERSIONS = ("kvcache_compress", "torch", "transformers")
"""Packages whose version all cells of a benchmark should share."""

FULL_BITS = 16
MISSING = "–"
FAILED = "failed"

Bits = Literal["packed_bits", "all_bits"]


@dataclass(frozen=True)
class Table:
    """All caches and benchmarks of one model: the full cache first, then by family and falling bits."""

    model: str
    dtype: str
    columns: list[Column]
    rows: list[Row]

    @property
    def title(self) -> str:
        return f"{self.model} ({self.dtype})"

    @property
    def full(self) -> Row | None:
        """The uncompressed cache."""
        return next((row for row in self.rows if row.lossless), None)

    def cells(self, column: Column) -> list[Cell]:
        """All cells of a benchmark, in the order of the rows."""
        return [row.cells[column.name] for row in self.rows if column.name in row.cells]

    def difference(self, row: Row, column: Column) -> float | None:
        """Main score minus the full cache's; None for the full cache itself, and where either is missing."""
        full = self.full
        if full is None or row is full:
            return None
        score, reference = row.score(column), full.score(column)
        return None if score is None or reference is None else score - reference

    def outgrown(self, row: Row) -> bool:
        """True if the whole cache took at least as much as the full one at the prompts measured."""
        return not row.lossless and row.all_bits is not None and row.all_bits >= FULL_BITS

    def points(self, column: Column, bits: Bits) -> list[Point]:
        """Compressing caches that have finished a benchmark, by increasing bits as measured in it.

        `value` is the score where less is better (KL already is a difference), else its difference from the full
        cache; the score itself if the full cache has none.
        """
        points = []
        for row in self.rows:
            score, difference = row.score(column), self.difference(row, column)
            if row.lossless or score is None:
                continue
            measured = getattr(row.cells[column.name], bits)
            if measured is not None:
                value = difference if column.higher_is_better and difference is not None else score
                points.append(Point(row, measured, value))
        front = pareto_front([(p.bits, -p.value if column.higher_is_better else p.value) for p in points])
        marked = [dataclasses.replace(point, on_front=index in front) for index, point in enumerate(points)]
        return sorted(marked, key=lambda point: (point.bits, point.row.number))

    def bits_text(self, row: Row, bits: Bits) -> str:
        """Bits, and the benchmark they were measured in if it is not the leading one."""
        measured = getattr(row, bits)
        if measured is None:
            return MISSING
        return f"{measured:.2f}" + ("" if row.measured_in == self.columns[0].name else f" ({row.measured_in})")

    def score_texts(self, row: Row, column: Column) -> tuple[str, str | None]:
        """A score (with its standard error, if there is one), `failed` or –, and its difference from the full cache.

        The difference is None if it adds nothing to the score, as with KL.
        """
        score = row.score(column)
        if score is None:
            failed = column.name in row.cells and row.cells[column.name].error is not None
            return FAILED if failed else MISSING, None
        error = row.cells[column.name].scores.get(f"{column.main_score}_stderr")
        text = column.text(score) + (f" ± {column.text(error)}" if error else "")
        difference = self.difference(row, column)
        return text, None if difference is None or difference == score else column.difference_text(difference)

    def score_names(self, column: Column) -> list[str]:
        """All scores of a benchmark, the main one first."""
        names = dict.fromkeys(name for cell in self.cells(column) for name in cell.scores)
        return sorted(names, key=lambda name: name != column.main_score)

    @property
    def notes(self) -> list[str]:
        """Notes on how to read the table."""
        notes = [
            f"Bits are per number, as measured in {self.columns[0].name} (elsewhere if said so); dense tokens count as "
            f"{FULL_BITS}, like the full cache, whatever dtype the model ran in ({self.dtype}). The packed part is "
            "what long prompts approach, the whole cache what these prompts took."
        ]
        if any(self.score_texts(row, column)[1] for row in self.rows for column in self.columns):
            notes.append("In brackets: the difference from the full cache.")
        if any(column.name not in row.cells for row in self.rows for column in self.columns):
            notes.append(f"{MISSING} was not measured.")
        for column in self.columns:
            reasons = dict.fromkeys(reason for cell in self.cells(column) for reason in cell.skipped)
            notes += [f"{column.name}, skipped: {reason}" for reason in reasons]
        return notes

    @property
    def failures(self) -> list[Failure]:
        """Each error once, with the caches that failed with it."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for column in self.columns:
            for row in self.rows:
                cell = row.cells.get(column.name)
                if cell is not None and cell.error is not None:
                    grouped.setdefault((column.name, cell.error), []).append(row.cache)
        return [Failure(benchmark, caches, message) for (benchmark, message), caches in grouped.items()]

    @property
    def doubts(self) -> list[str]:
        """Warnings about benchmarks whose cells are not comparable, because their settings differ."""
        doubts = []
        for column in self.columns:
            done = [cell for cell in self.cells(column) if cell.error is None]
            settings = {
                "options": {json.dumps(cell.benchmark["options"], sort_keys=True) for cell in done},
                "seeds": {str(cell.seed) for cell in done},
                "numbers of samples": {str(cell.samples) for cell in done},
                **{f"versions of {name}": {str(cell.versions.get(name)) for cell in done} for name in VERSIONS},
            }
            unlike = [name for name, values in settings.items() if len(values) > 1]
            if unlike:
                doubts.append(f"{column.name}: the cells have different {' and '.join(unlike)}; run them again")
        return doubts


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the points (bits, loss) that no other point dominates."""
    return {
        index
        for index, (bits, loss) in enumerate(points)
        if not any(b <= bits and other <= loss and (b, other) != (bits, loss) for b, other in points)
    }


def tables(cells: Sequence[Cell]) -> list[Table]:
    """Make one table per model and dtype, in order of appearance.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError("cells=[]: allowed at least one")
    by_model: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_model.setdefault((cell.model, cell.dtype), []).append(cell)
    return [_table(*model, of_model) for model, of_model in by_model.items()]


def family(cell: Cell) -> str:
    """Method or backend of a cell's cache, `full` for the uncompressed one."""
    if cell.cache["lossless"]:
        return "full"
    config = cell.cache["config"]
    methods = [side.get("method", "none") for side in (config.get("keys", {}), config.get("values", {}))]
    method = next((method for method in methods if method != "none"), None)
    peer = config.get("backend") if config.get("class") == "QuantizedCache" else None
    name: str = method or peer or cell.cache["name"].partition("@")[0].partition("-")[0]
    return name


def _table(model: str, dtype: str, cells: Sequence[Cell]) -> Table:
    columns = _columns(cells)
    by_cache: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_cache.setdefault(cell.cache["name"], {})[cell.benchmark["name"]] = cell
    rows = [_row(name, of_cache, columns) for name, of_cache in by_cache.items()]
    rows.sort(key=lambda row: (not row.lossless, row.family, -(row.packed_bits or 0), row.cache))
    numbered = [dataclasses.replace(row, number=number) for number, row in enumerate(rows, start=1)]
    return Table(model, dtype, columns, numbered)


def _columns(cells: Sequence[Cell]) -> list[Column]:
    columns = {}
    for cell in cells:
        name, kind = cell.benchmark["name"], cell.benchmark["kind"]
        scores = [abs(c.score) for c in cells if c.benchmark["name"] == name and c.score is not None]
        peak = max((score for score in scores if math.isfinite(score)), default=0.0)
        columns[name] = Column(name, kind, cell.benchmark["main_score"], cell.benchmark["higher_is_better"], peak)
    return sorted(columns.values(), key=lambda column: (column.kind != "perplexity", column.name))


def _row(name: str, cells: dict[str, Cell], columns: Sequence[Column]) -> Row:
    done = [cells[c.name] for c in columns if c.name in cells and cells[c.name].error is None]
    measured = next((cell for cell in done if cell.packed_bits is not None), None)
    least = [int(cell.packed_tokens["least"]) for cell in done if "least" in cell.packed_tokens]
    some = next(iter(cells.values()))
    return Row(
        number=0,
        cache=name,
        family=family(some),
        lossless=some.cache["lossless"],
        packed_bits=measured.packed_bits if measured else None,
        all_bits=measured.all_bits if measured else None,
        measured_in=measured.benchmark["name"] if measured else None,
        packed_tokens=min(least, default=None),
        cells=cells,
    )
