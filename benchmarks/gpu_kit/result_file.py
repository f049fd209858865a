"""Result file of the GPU benchmarks: complete at any time, written after each row, continued by later runs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.files.atomic import is_replaceable
from kvcache_compress.files.text import parse_json, read_text

from .jobs import FAILED, KEYS, NOT_MEASURED, UNCHECKED, Checks, Job, planned_again
from .predicted import predicted_ms

COMPARED = ("sources", "versions", "hardware", "small")
"""Entries that must be equal for a file to be continued; not the commit, as the sources' digest says what ran."""
COMPARED_WITH_FULL = {
    "decode": {"milliseconds": "speedup"}, "models": {"tokens_per_second": "speedup"}, "prefill": {"seconds": "ratio"},
}  # fmt: skip
"""Figures that are compared with the full cache's of the same size, and the name of their ratio."""
FOLDERS = ("kvcache_compress", "triton_kernels", "configs", "benchmarks/gpu_kit")


def hash_sources(root: Path) -> str:
    """Digest of all code and presets that take part in the measurements, committed or not."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(path for kind in ("*.py", "*.yaml", "*.json") for path in (root / folder).rglob(kind)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class ResultFile:
    """Rows by job, and the file that holds them; planned rows are in it too, marked as not measured.

    An existing file of the same code, versions and hardware is continued: rows that were measured or failed stay, and
    rows that were not measured, or whose process died or hung, are planned again. Any other file is kept as
    `NAME.previous.json`, the next as `NAME.previous-2.json`.
    """

    def __init__(self, path: Path, where: Mapping[str, Any], jobs: Sequence[Job]) -> None:
        """Open or begin the file; `where` holds command, date, commit and the entries of `COMPARED`."""
        self.path, self.where = path, dict(where)
        self._lock = threading.Lock()
        self.runs = [{key: self.where.pop(key) for key in ("command", "date", "minutes")}]
        self.rows: dict[Job, dict[str, Any]] = {}
        self.differs = self._read()
        self.jobs = [job for job in jobs if job not in self.rows]
        for job in self.jobs:
            self.rows[job] = job.named | {"error": f"{NOT_MEASURED} the run ended before"}
        self.predicted: dict[Job, dict[str, Any]] = {}
        accelerator = self.where.get("hardware", {}).get("accelerator")
        for job in self.rows:
            if job.part == "decode" and (found := predicted_ms(job.named, accelerator)) is not None:
                self.predicted[job] = {"predicted_ms": found[0], "predicted_bound": found[1]}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def _read(self) -> str | None:
        """Read the rows of an existing file, or move it aside and return what differs."""
        if not self.path.is_file() or not is_replaceable(self.path):
            return None
        try:
            contents = parse_json(read_text(self.path), str(self.path))
            differs = ", ".join(key for key in COMPARED if contents.get(key) != self.where.get(key))
            if not differs:
                rows = [(part, row) for part in KEYS for row in contents[part]]
                self.rows = {Job.of(part, row): _own(row) for part, row in rows if not planned_again(row)}
                self.runs = contents["runs"] + self.runs
        except (ValueError, TypeError, KeyError, AttributeError):
            self.rows, differs = {}, "no result file"
        if not differs:
            return None
        path = self.path.resolve()
        kept, number = path.with_suffix(".previous.json"), 1
        while kept.exists():
            number += 1
            kept = path.with_suffix(f".previous-{number}.json")
        path.replace(kept)
        return differs

    def keep(self, job: Job, row: dict[str, Any]) -> None:
        """Set the row of a job and write the file; thread-safe."""
        with self._lock:
            self.rows[job] = row
            self.write()

    def close(self) -> None:
        """Mark all remaining rows as not measured for lack of time."""
        for row in self.rows.values():
            if not measured(row) and row["error"].endswith("the run ended before"):
                row["error"] = f"{NOT_MEASURED} time"
        self.write()

    def contents(self) -> dict[str, Any]:
        """Contents of the file, with predictions, comparisons with the full cache, and marks of invalid rows."""
        finished, checks = all(measured(row) for row in self.rows.values()), Checks(self.rows)
        parts: dict[str, list[dict[str, Any]]] = {part: [] for part in KEYS}
        for job, row in self.rows.items():
            parts[job.part].append(self._completed(job, row, checks))
        return {**self.where, "runs": self.runs, "finished": finished, **parts}

    def _completed(self, job: Job, row: dict[str, Any], checks: Checks) -> dict[str, Any]:
        more: dict[str, Any] = dict(self.predicted.get(job, {}))
        if row.get("error") is None and (problem := row.get("invalid") or checks.failure(job)):
            more["invalid"] = problem
        full = self.rows.get(_full(job))
        for figure, name in COMPARED_WITH_FULL.get(job.part, {}).items():
            if row.get(figure) and full and full.get(figure):
                ratio = row[figure] / full[figure]
                more[name] = 1 / ratio if name == "speedup" and job.part == "decode" else ratio
        if "speedup" in more and job.part == "decode":
            more["bound"] = full["bits"] / row["bits"]  # type: ignore[index]
        return row | more

    def write(self) -> None:
        """Replace the file atomically."""
        write_atomically(self.path, json.dumps(self.contents(), indent=1) + "\n")


def measured(row: Mapping[str, Any]) -> bool:
    """True if a row has figures or failed, False if there was no time for it."""
    return not str(row.get("error")).startswith(NOT_MEASURED)


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the mark of its check, which may be made again."""
    return {
        name: None if name == "invalid" and str(mark).startswith((FAILED, UNCHECKED)) else mark
        for name, mark in row.items()
    }


def _full(job: Job) -> Job:
    """Job of the full cache that a job is compared with."""
    values = ("full", *job.values[1:])
    return Job(job.part, (*values[:-1], "plain") if job.part == "decode" else values)
