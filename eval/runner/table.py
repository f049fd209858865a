"""The table of a comparison: a file of JSON lines, with a line per cell.

A cell is the result of one cache in one benchmark with one model. While a cell is unfinished, each of its samples is
appended as a line `{"unfinished": [MODEL, BENCHMARK, CACHE, DIGEST], "record": ...}`; writing the cell removes them.
A later run reuses a record if the digests of the cell (weights, options, cache, seed) and of the sample agree. The run
that may change the table holds `FILE.lock`.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.benchmark import Record
from kvcache_compress.files.text import read_text

SUFFIX = ".jsonl"
_UNFINISHED = '{"unfinished": '


@dataclass(frozen=True)
class Cell:
    """The result of one cache in one benchmark with one model.

    Attributes:
        benchmark: `name`, `kind`, `options`, `main_score`, `higher_is_better`.
        cache: `name`, `lossless`, and `config`, which is everything that defines the cache.
        digest: digest of everything that results depend on.
        weights: fingerprint of the model's weights.
        error: why there are no scores; None for a finished cell.
        skipped: why parts of the benchmark have no samples with this model.
        scores: what the benchmark's `summarize` returned.
        samples: number of scored samples; what follows is over them.
        packed_tokens: packed tokens per sequence after the prompt: `least`, `mean` and `most`.
        packed_bits, all_bits, total_bytes: means of the sizes in `Measured`.
        seconds: time to fill the cache, and of all that followed; the prefills, which all caches share, are apart.
        records: a record per sample: `id`, `digest`, `tokens` (of the prompt), the sizes in `Measured`, `seconds`,
            `prefill_seconds`, `commit`, and what the benchmark adds.
        further: records of samples beyond this run's limit.
    """

    model: str
    dtype: str
    benchmark: dict[str, Any]
    cache: dict[str, Any]
    seed: int
    digest: str
    attention: str = ""
    weights: str = ""
    error: str | None = None
    skipped: list[str] = dataclasses.field(default_factory=list)
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: int = 0
    packed_tokens: dict[str, float] = dataclasses.field(default_factory=dict)
    packed_bits: float | None = None
    all_bits: float | None = None
    total_bytes: float | None = None
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    command: str | None = None
    date: str = ""
    commit: str | None = None
    versions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    hardware: dict[str, Any] = dataclasses.field(default_factory=dict)
    records: list[Record] = dataclasses.field(default_factory=list)
    further: list[Record] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        """The names of model, benchmark and cache."""
        return self.model, self.benchmark["name"], self.cache["name"]

    @property
    def score(self) -> float | None:
        """The main score; None for a failed cell."""
        return self.scores.get(self.benchmark["main_score"])


class ResultTable:
    """The table of a comparison.

    Args:
        path: the table's file, whose name ends in `.jsonl`; None keeps the table in memory.

    Raises:
        ValueError: The name has another end, or the file is no table.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.cells: list[Cell] = []
        self._unfinished: list[dict[str, Any]] = []
        if path is not None and (path.suffix != SUFFIX or path.is_dir()):
            raise ValueError(f"output={str(path)!r}: must be a file whose name ends in {SUFFIX}")
        self.read()

    def read(self) -> None:
        """Read what other runs have written meanwhile."""
        if self.path is None or not self.path.is_file():
            return
        self.cells, self._unfinished = [], []
        for number, line in enumerate(read_text(self.path).split("\n"), 1):
            partial = line.startswith(_UNFINISHED) or _UNFINISHED.startswith(line)
            try:
                if partial:
                    self._unfinished.append(json.loads(line))
                else:
                    self.cells.append(Cell(**json.loads(line)))
            except (ValueError, TypeError) as error:
                if not partial:  # a partial line is empty, or an interruption cut it short
                    raise ValueError(f"{self.path}, line {number}: not a cell of a comparison: {error}") from error

    def cell(self, like: Cell) -> Cell | None:
        """The cell of the same names, whatever its digest."""
        return next((cell for cell in self.cells if cell.key == like.key), None)

    def unfinished(self, cell: Cell) -> tuple[dict[str, Record], str | None]:
        """Records of an unfinished cell by sample id, and its error if there was one."""
        entries = [entry for entry in self._unfinished if entry["unfinished"] == [*cell.key, cell.digest]]
        records = {entry["record"]["id"]: entry["record"] for entry in entries if "record" in entry}
        return records, next((entry["error"] for entry in entries if "error" in entry), None)

    def append(self, cell: Cell, **entry: Any) -> None:
        """Add a `record` or an `error` of an unfinished cell."""
        self._unfinished.append({"unfinished": [*cell.key, cell.digest], **entry})
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The line break comes first, because an interruption may have cut the last line short.
            with self.path.open("ab", buffering=0) as stream:
                stream.write(f"\n{json.dumps(self._unfinished[-1], allow_nan=False)}".encode("ascii"))

    def write(self, cells: Sequence[Cell]) -> None:
        """Replace the cells of the same names, and drop their unfinished records."""
        self.read()
        new = {cell.key: cell for cell in cells}
        self._unfinished = [entry for entry in self._unfinished if tuple(entry["unfinished"][:3]) not in new]
        self.cells = [new.pop(cell.key, cell) for cell in self.cells] + list(new.values())
        if self.path is not None:
            lines = [*map(dataclasses.asdict, self.cells), *self._unfinished]
            text = "".join(f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n" for line in lines)
            write_atomically(self.path, text)


def read_cells(path: Path) -> list[Cell]:
    """Read all cells of a table.

    Raises:
        ValueError: The file is missing, has no cell, or is no table.
    """
    read_text(path, f"results={str(path)!r}")
    if not (cells := ResultTable(path).cells):
        raise ValueError(f"results={str(path)!r}: no finished cell in it")
    return cells


def with_scores(cell: Cell, scores: dict[str, float]) -> Cell:
    """The cell with its scores, and with sizes and times aggregated over its records.

    Raises:
        ValueError: A score is not finite.
    """
    if not all(math.isfinite(score) for score in scores.values()):
        raise ValueError(f"scores that are not finite: {scores}")
    records = cell.records
    packed = [record["packed_tokens"] for record in records]
    sizes = ("packed_bits", "all_bits", "total_bytes")
    means: dict[str, Any] = {name: statistics.fmean(record[name] for record in records) for name in sizes}
    return dataclasses.replace(
        cell,
        scores=scores,
        samples=len(records),
        packed_tokens={"least": min(packed), "mean": statistics.fmean(packed), "most": max(packed)},
        **means,
        seconds=round(sum(record["seconds"] for record in records), 1),
        prefill_seconds=round(sum(record["prefill_seconds"] for record in records), 1),
    )


def difference(cell: Cell, base: Cell, score: str, digits: int) -> str:
    """Mean difference of a record's score from another cache's on the same samples, with its standard error."""
    before = {record["id"]: record[score] for record in base.records}
    changes = [record[score] - before[record["id"]] for record in cell.records]
    error = f" ± {statistics.stdev(changes) / math.sqrt(len(changes)):.{digits}f}" if len(changes) > 1 else ""
    return f"{statistics.fmean(changes):+.{digits}f}{error}"
