"""Cells of a comparison on disk: a JSON file per model, benchmark and cache, and the samples of unfinished ones.

    OUTPUT/MODEL/BENCHMARK/CACHE.json             a finished cell, or one that failed (with `error`)
    OUTPUT/MODEL/BENCHMARK/CACHE.part-DIGEST-RANK.jsonl
                                                  samples that process RANK has done; removed with the cell written
    OUTPUT/MODEL/BENCHMARK/.lock                  held by the one run that may change the files beside it

A later run reuses a record if the cell's digest (weights, options, cache, seed) and the sample's agree.
A finished cell of another digest is never overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.benchmark import Record
from kvcache_compress.files.text import parse_json, read_text


@dataclass(frozen=True)
class Cell:
    """Result of one cache in one benchmark with one model.

    Attributes:
        model: the model's name; `dtype` its type, `attention` its implementation, `weights` their fingerprint.
        benchmark: `name`, `kind`, `options`, `main_score`, `higher_is_better`.
        cache: `name`, `lossless`, and `config`, everything that it was made of.
        seed: set before each sample.
        digest: of everything above that results depend on.
        error: why there are no scores; None for a finished cell.
        skipped: reasons why parts of the benchmark have no samples with this model.
        scores: from the benchmark's `summarize`.
        samples: how many were scored.
        packed_tokens: tokens per sequence stored compressed after the prompt: `least`, `mean` and `most` over samples.
        packed_bits: bits per compressed number; `all_bits` over the whole cache; means over samples.
        total_bytes: bytes of the cache, beside a 16-bit model, mean over samples.
        seconds: filling the cache and all that followed, over all samples; `prefill_seconds` the prefills, shared by
            all caches.
        records: one per sample: `id`, `digest`, `tokens` (of the prompt), `packed_tokens`, `packed_bits`, `all_bits`,
            `total_bytes`, `seconds`, `prefill_seconds`, `commit`, and the benchmark's own.
        further: records of samples beyond this run's limit.
        command, date, commit, versions, hardware: how and where it was measured.
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
    def score(self) -> float | None:
        """The benchmark's main score; None for a failed cell."""
        return self.scores.get(self.benchmark["main_score"])

    def to_json(self) -> str:
        """JSON with a line per record, so that diffs of two runs are readable."""
        fields = dataclasses.asdict(self)
        lists = {name: fields.pop(name) for name in ("records", "further")}
        text = json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        for name, records in lists.items():
            lines = (f"    {json.dumps(record, ensure_ascii=False, allow_nan=False)}" for record in records)
            text += f',\n  "{name}": [\n' + ",\n".join(lines) + "\n  ]"
        return text + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> Cell:
        """Read a cell.

        Raises:
            ValueError: the file is not a cell.
        """
        try:
            return cls(**parse_json(read_text(path), path.name))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not a cell of a comparison: {error}") from error


def cell_path(output: Path, model: str, benchmark: str, cache: str) -> Path:
    """Path of a cell's file; characters that file systems dislike become `-`."""
    return output.joinpath(safe_name(model), safe_name(benchmark), f"{safe_name(cache)}.json")


def lock_path(output: Path, model: str, benchmark: str) -> Path:
    """Path of the lock held while the cells of a model and benchmark are changed."""
    return output.joinpath(safe_name(model), safe_name(benchmark), ".lock")


def safe_name(name: str) -> str:
    """The name with characters that file systems dislike replaced by `-`."""
    return re.sub(r"[^\w.@=,+-]+", "-", name).strip("-.")


def read_cells(output: Path) -> list[Cell]:
    """All cells under a folder, in the order of their names.

    Raises:
        ValueError: no such folder, no cell in it, or a file that is no cell.
    """
    paths = sorted(path for path in output.glob("*/*/*.json") if not path.name.startswith("."))
    if not paths:
        raise ValueError(f"output={str(output)!r}: no finished cell in it")
    return [Cell.read(path) for path in paths]


class Parts:
    """Records of an unfinished cell, appended as they come, and the error that kept it from finishing.

    Args:
        path: of the cell's JSON; None keeps everything in memory.
        digest: of the cell; part of the files' names.
        rank: of this process.
    """

    def __init__(self, path: Path | None, digest: str, rank: int = 0) -> None:
        self.path, self.digest, self.rank = path, digest, rank
        self._entries: list[dict[str, Any]] = []

    def _files(self) -> list[Path]:
        if self.path is None:
            return []
        start = f"{self.path.name.removesuffix('.json')}.part-{self.digest}-"
        files = self.path.parent.iterdir() if self.path.parent.is_dir() else ()
        return sorted(file for file in files if file.name.startswith(start) and file.suffix == ".jsonl")

    def read(self) -> tuple[dict[str, Record], str | None]:
        """Records of all processes by sample id, and an error if there was one. A line cut short is dropped."""
        entries = list(self._entries)
        for file in self._files():
            for line in file.read_text(encoding="ascii", errors="replace").split("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    entries.append(json.loads(line))
        records = {entry["record"]["id"]: entry["record"] for entry in entries if "record" in entry}
        return records, next((entry["error"] for entry in entries if "error" in entry), None)

    def add_record(self, record: Record) -> None:
        self._append({"record": record})

    def add_error(self, message: str) -> None:
        self._append({"error": message})

    def _append(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            self._entries.append(entry)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_name(f"{self.path.name.removesuffix('.json')}.part-{self.digest}-{self.rank}.jsonl")
        with file.open("a", encoding="ascii") as stream:
            # The line break comes first: an interruption may have cut the last entry short. ASCII, as a text may hold
            # characters that other readers take for line breaks.
            stream.write("\n" + json.dumps(entry, allow_nan=False))

    def clear(self) -> None:
        self._entries.clear()
        for file in self._files():
            file.unlink()


def with_scores(cell: Cell, scores: dict[str, float]) -> Cell:
    """The cell with its scores, and sizes and times aggregated over its records.

    Raises:
        ValueError: scores that are not finite.
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


def write_cell(path: Path, cell: Cell) -> None:
    write_atomically(path, cell.to_json())


def stored_cell(path: Path | None) -> Cell | None:
    """Read the cell at a path, finished or failed, whatever its digest; None if there is no file.

    Raises:
        ValueError: a file that is no cell.
    """
    return Cell.read(path) if path is not None and path.is_file() else None
