"""Tables of a comparison, one per model and dtype: a row per cache, a column per benchmark.

The first column leads: by it the smallest good cache is found. A perplexity benchmark leads if there is one, because KL
distinguishes caches long before a task's score does.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache_compress.eval.runner.table import Cell

FULL_BITS = 16
MISSING = "–"
FAILED = "failed"
MAX_KL = 0.02
"""A good cache's largest KL from the full cache, in nats per token: about 2 % more perplexity.

In the committed comparison of SmolLM2, caches below it found at least 19 of 20 pass keys. Caches with twice as much
missed several.
"""
MAX_SHARE = 0.05
"""A good cache's largest loss without a KL: a share of the full cache's score, or nats of a log-probability."""
VERSIONS = ("kvcache_compress", "torch", "transformers")
"""Packages whose version all cells of a benchmark should share."""


@dataclass(frozen=True)
class Column:
    """A benchmark: its name, kind and main score, whether more is better, and the decimals that are shown."""

    name: str
    kind: str
    main_score: str
    higher_is_better: bool
    digits: int

    @property
    def label(self) -> str:
        """The main score in words."""
        return "KL" if self.main_score == "kl" else self.main_score.replace("_", " ")

    @property
    def heading(self) -> str:
        return f"{self.name}: {self.label} {'↑' if self.higher_is_better else '↓'}"


@dataclass(frozen=True)
class Row:
    """A cache.

    Attributes:
        cache: its name.
        family: its method, the peer's back end, or the beginning of its name.
        lossless: True if it compresses nothing on purpose.
        packed_bits: bits per packed number in the first benchmark that the cache has finished.
        all_bits: bits per number of the whole cache in that benchmark.
        packed_tokens: packed tokens in the sample that has fewest.
        cells: its cells by benchmark.
    """

    cache: str
    family: str
    lossless: bool
    packed_bits: float | None
    all_bits: float | None
    packed_tokens: int | None
    cells: dict[str, Cell]

    def score(self, column: Column) -> float | None:
        """The main score; None for a failed or missing cell."""
        cell = self.cells.get(column.name)
        return None if cell is None or cell.error is not None else cell.score


@dataclass(frozen=True)
class Table:
    """All caches and benchmarks of one model. The full cache comes first, the others by method and falling bits."""

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

    def difference(self, row: Row, column: Column) -> float | None:
        """Main score minus the full cache's; None for the full cache itself, or if either score is missing."""
        score, reference = row.score(column), None if self.full is None else self.full.score(column)
        return None if row is self.full or score is None or reference is None else score - reference

    def uncertainty(self, row: Row, column: Column) -> float | None:
        """Standard error of `difference`, or of the score itself without a full cache; None if it is unknown."""
        if row.score(column) is None:
            return None
        reference = None if self.full is None or self.full is row else self.full.cells.get(column.name)
        usable = reference is not None and reference.error is None
        return standard_error(row.cells[column.name], reference if usable else None)

    def loss(self, row: Row, column: Column) -> float | None:
        """The KL, or how far the score is below the full cache's."""
        if not column.higher_is_better:
            return row.score(column)
        difference = self.difference(row, column)
        return None if difference is None else -difference

    def bound(self, column: Column) -> float | None:
        """A good cache's largest loss; None if the full cache's score is missing or zero."""
        if not column.higher_is_better:
            return MAX_KL
        reference = None if self.full is None else self.full.score(column)
        return MAX_SHARE * (1 if column.main_score.endswith("logprob") else abs(reference)) if reference else None

    @property
    def smallest(self) -> Row | None:
        """The cache with the fewest packed bits whose loss in the leading benchmark is within `bound`."""
        bound = self.bound(self.columns[0])
        losses = [(row, self.loss(row, self.columns[0])) for row in self.rows if not row.lossless]
        good = [row for row, loss in losses if None not in (bound, loss) and loss <= bound + 1e-9]  # type: ignore[operator]
        return min(good, key=lambda row: row.packed_bits or FULL_BITS, default=None)

    def front(self, column: Column) -> list[Row]:
        """The Pareto front by rising bits: caches that no other beats in both packed bits and loss."""
        losses = [
            (row.cells[column.name].packed_bits or FULL_BITS, loss, row)
            for row in self.rows
            if not row.lossless and (loss := self.loss(row, column)) is not None
        ]
        best: list[Row] = []
        least = math.inf
        for _, loss, row in sorted(losses, key=lambda each: each[:2]):
            if loss < least:
                best.append(row)
                least = loss
        return best

    def text(self, row: Row, column: Column) -> str:
        """A cell of the table: the score, and in brackets its difference from the full cache; `failed` or –.

        The standard error follows the difference. A KL is a difference itself, so it has no brackets.
        """
        score = row.score(column)
        if score is None:
            return FAILED if column.name in row.cells else MISSING
        error = None if row.lossless else self.uncertainty(row, column)
        more = ""
        if error is not None:
            more = f" ± {error:.{column.digits}f}" if round(error, column.digits) or not error else f" ± {error:.1g}"
        difference = self.difference(row, column)
        if difference is None or difference == score:
            return f"{score:.{column.digits}f}{more}"
        if not round(difference, column.digits):
            return f"{score:.{column.digits}f} (±0{more if error else ''})"
        return f"{score:.{column.digits}f} ({difference:+.{column.digits}f}{more})".replace("-", "−")

    def lines(self) -> list[list[str]]:
        """The table as texts: a line of headings, then a line per cache by falling bits."""
        bits = "bits, packed part", "bits, whole cache", "packed tokens, least"
        lines = [["cache", *bits, *(column.heading for column in self.columns)]]
        for row in sorted(self.rows, key=lambda row: (not row.lossless, -(row.packed_bits or 0))):
            sizes = [bits_text(row.packed_bits), bits_text(row.all_bits), str(row.packed_tokens or 0)]
            lines.append([row.cache, *sizes, *(self.text(row, column) for column in self.columns)])
        return lines

    def notes(self) -> list[str]:
        """The smallest good cache, failures, cells that do not compare, and how to read the table."""
        column, bound = self.columns[0], self.bound(self.columns[0])
        notes = []
        if bound is not None:
            best = self.smallest
            name = "none" if best is None else f"{best.cache} ({bits_text(best.packed_bits)} bits)"
            notes.append(f"Smallest cache that loses at most {bound:.3g} in {column.name} ({column.label}): {name}.")
        failures: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for name, cell in row.cells.items():
                if cell.error is not None:
                    failures.setdefault((name, cell.error), []).append(row.cache)
        notes += [f"{FAILED}: {name}, {', '.join(caches)}: {error}" for (name, error), caches in failures.items()]
        for column in self.columns:
            cells = [row.cells[column.name] for row in self.rows if column.name in row.cells]
            if unlike := _unlike([cell for cell in cells if cell.error is None]):
                notes.append(f"{column.name}: cells differ in {' and '.join(unlike)}; run them again to compare them")
            skipped = dict.fromkeys(reason for cell in cells for reason in cell.skipped)
            notes += [f"{column.name}, skipped: {reason}" for reason in skipped]
        notes.append(
            f"Bits are per number. Dense numbers count as {FULL_BITS} bits, whatever dtype the model ran in. "
            '"Whole cache" is what these prompts took; on longer prompts it approaches "packed part". Brackets hold '
            "the difference from the full cache and its standard error, compared sample by sample."
        )
        return notes


def bits_text(bits: float | None) -> str:
    return MISSING if bits is None else f"{bits:.2f}"


def _unlike(cells: Sequence[Cell]) -> list[str]:
    """The settings that differ between cells and should not."""
    settings = {
        "options": {json.dumps(cell.benchmark["options"], sort_keys=True) for cell in cells},
        "seeds": {str(cell.seed) for cell in cells},
        "numbers of samples": {str(cell.samples) for cell in cells},
        **{f"versions of {name}": {str(cell.versions.get(name)) for cell in cells} for name in VERSIONS},
    }
    return [name for name, values in settings.items() if len(values) > 1]


def standard_error(cell: Cell, reference: Cell | None) -> float | None:
    """Standard error of a cell's main score or, sample by sample, of its difference from a reference's.

    It is known for scores that are means over samples or, with several tasks, means over tasks of their samples' means,
    also in per cent. It is None for other scores, and if a task has only one sample.
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
    """Make a table per model and dtype, in order of appearance."""
    by_model: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_model.setdefault((cell.model, cell.dtype), []).append(cell)
    return [_table(*model, of_model) for model, of_model in by_model.items()]


def family(cell: Cell) -> str:
    """The method or back end of a cell's cache; `full` for the full cache."""
    if cell.cache["lossless"]:
        return "full"
    config = cell.cache["config"]
    methods = [config.get(side, {}).get("method", "none") for side in ("keys", "values")]
    method = next((method for method in methods if method != "none"), None)
    peer = config.get("backend") if config.get("class") == "QuantizedCache" else None
    name: str = method or peer or cell.cache["name"].partition("@")[0].partition("-")[0]
    return name


def _table(model: str, dtype: str, cells: Sequence[Cell]) -> Table:
    columns: dict[str, Column] = {}
    for cell in cells:
        name, main, higher = cell.benchmark["name"], cell.benchmark["main_score"], cell.benchmark["higher_is_better"]
        peak = max((abs(c.score) for c in cells if c.benchmark["name"] == name and c.score is not None), default=0.0)
        digits = (3 if peak < 10 else 2) if higher else 4
        columns[name] = Column(name, cell.benchmark["kind"], main, higher, digits)
    ordered = sorted(columns.values(), key=lambda column: (column.kind != "perplexity", column.name))
    by_cache: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_cache.setdefault(cell.cache["name"], {})[cell.benchmark["name"]] = cell
    rows = []
    for name, of_cache in by_cache.items():
        found = (of_cache.get(column.name) for column in ordered)
        done = [cell for cell in found if cell is not None and cell.error is None]
        some = next(iter(of_cache.values()))
        packed, whole = (done[0].packed_bits, done[0].all_bits) if done else (None, None)
        tokens = min((int(cell.packed_tokens["least"]) for cell in done if cell.packed_tokens), default=None)
        rows.append(Row(name, family(some), some.cache["lossless"], packed, whole, tokens, of_cache))
    rows.sort(key=lambda row: (not row.lossless, row.family, -(row.packed_bits or 0), row.cache))
    return Table(model, dtype, ordered, rows)
