"""Measure rows of a finished comparison again, to learn whether its figures still hold with the code of today."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from .comparison import Comparison, compare
from .progress import Progress
from .table import read_cells

TOLERANCE = 0.1
"""Relative difference up to which a figure holds: another seed changes the loss of a window by about a tenth."""


class Replayed(NamedTuple):
    """The main score of a cache in a benchmark over the samples measured again, as stored and as it is now."""

    model: str
    benchmark: str
    cache: str
    stored: float
    now: float

    @property
    def holds(self) -> bool:
        return abs(self.now - self.stored) <= TOLERANCE * abs(self.stored)


def replay(
    comparison: Comparison, samples: int = 1, caches: Collection[str] = (), benchmarks: Collection[str] = (),
    on_progress: Progress | None = None,
) -> tuple[list[Replayed], list[str]]:  # fmt: skip
    """Measure the first samples of finished rows again, all rows or those of some caches and benchmarks.

    Returns:
        The rows, and messages about those that cannot be measured or that the table does not hold.

    Raises:
        ValueError: The comparison has no such cache or benchmark, or its file of results is missing or wrong.
    """
    stored_cells = {cell.key: cell for cell in read_cells(comparison.output)}
    chosen = [entry for entry in comparison.caches if not caches or entry.name in caches]
    wanted = benchmarks or comparison.benchmarks
    kinds = {name: {**of, "limit": samples} for name, of in comparison.benchmarks.items() if name in wanted}
    for what, given, known in (("cache", caches, {entry.name for entry in chosen}), ("benchmark", benchmarks, kinds)):
        if missing := sorted({*given} - {*known}):
            raise ValueError(f"{what}={missing[0]!r}: must be one of the comparison's: {', '.join(known) or 'none'}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        change = {"caches": tuple(chosen), "benchmarks": kinds, "output": Path(folder) / "replayed.jsonl"}
        limited = comparison.model_copy(update=change)
        cells, problems = compare(limited, on_progress)
    suite = limited.suite()
    for cell in cells:
        model, benchmark, cache = cell.key
        stored = stored_cells.get(cell.key)
        records = {record["id"]: record for record in stored.records} if stored else {}
        same = [records.get(record["id"], {}) for record in cell.records]
        if cell.error is not None:
            problems.append(f"{benchmark}, {cache}: {cell.error}")
        elif [record.get("digest") for record in same] != [record["digest"] for record in cell.records]:
            problems.append(f"{benchmark}, {cache}: {comparison.output} has no result on these samples")
        elif not cell.cache["lossless"]:
            scores = suite[benchmark].summarize(same)
            found.append(Replayed(model, benchmark, cache, scores[cell.benchmark["main_score"]], cell.score or 0.0))
    return found, problems
