"""Tables of a comparison's cells, one per model.

A row is a cache, a column a benchmark with its main score. The first column leads: it decides which caches are on the
front and which are recommended (`answer.py`). A perplexity benchmark leads if there is one, because KL tells caches
apart long before a task's score does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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

    def uncertainty(self, row: Row, column: Column) -> float | None:
        """Standard error of `difference`, sample by sample, or of the score itself if there is no full cache's.

        None if it is not known: with one sample, or where the score is no mean of its samples' scores.
        """
        cell = row.cells.get(column.name)
        if cell is None or row.score(column) is None:
            return None
        if (known := cell.scores.get(f"{column.main_score}_stderr")) is not None:
            return known
        reference = None if self.full is None or self.full is row else self.full.cells.get(column.name)
        return standard_error(cell, None if reference is None or reference.error is not None else reference)

    @property
    def shown(self) -> list[Column]:
        """The leading benchmark, and all others of which every compressing cache's score has a standard error."""

        def known(column: Column) -> bool:
            rows = [row for row in self.rows if not row.lossless and row.score(column) is not None]
            return all(self.uncertainty(row, column) is not None for row in rows)

        return [column for column in self.columns if column is self.columns[0] or known(column)]

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
        """A score, `failed` or –, and its difference from the full cache; the standard error is with the latter.

        There is no difference if it adds nothing to the score, as with KL, whose standard error follows itself.
        """
        score = row.score(column)
        if score is None:
            failed = column.name in row.cells and row.cells[column.name].error is not None
            return FAILED if failed else MISSING, None
        error = None if row.lossless else self.uncertainty(row, column)
        suffix = "" if error is None else f" ± {column.error_text(error)}"
        difference = self.difference(row, column)
        if difference is None or difference == score:
            return column.text(score) + suffix, None
        unchanged = not error and not round(difference, column.digits)
        return column.text(score), column.difference_text(difference) + ("" if unchanged else suffix)

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
            notes.append(
                "In brackets: the difference from the full cache and its standard error, sample by sample; ±0 if no "
                "sample differs."
            )
        if hidden := [column.name for column in self.columns if column not in self.shown]:
            notes.append(f"Without a standard error, and so only among all scores: {', '.join(hidden)}.")
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


def standard_error(cell: Cell, reference: Cell | None) -> float | None:
    """Standard error of a cell's main score, or of its difference from a reference's, sample by sample.

    Scores are means over samples or, with several tasks, over tasks of the means over their samples, perhaps in
    per cent; None for others, and where a task has one sample.
    """
    name = cell.benchmark["main_score"]

    def values(one: Cell) -> dict[Any, float]:
        return {record["id"]: record.get(name, record.get("score", math.nan)) for record in one.records}

    own, others = values(cell), None if reference is None else values(reference)
    by_task: dict[str, list[str]] = {}
    for record in cell.records:
        if others is None or record["id"] in others:
            by_task.setdefault(record.get("task", ""), []).append(record["id"])
    if not by_task or any(len(ids) < 2 for ids in by_task.values()):
        return None
    mean = statistics.fmean(statistics.fmean(own[one] for one in ids) for ids in by_task.values())
    scale = next((scale for scale in (1, 100) if math.isclose(scale * mean, cell.score or 0, abs_tol=1e-6)), None)
    if scale is None:
        return None
    changes = ([own[one] - (others[one] if others else 0) for one in ids] for ids in by_task.values())
    variance = sum(statistics.variance(of_task) / len(of_task) for of_task in changes)
    return scale * math.sqrt(variance) / len(by_task)


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
