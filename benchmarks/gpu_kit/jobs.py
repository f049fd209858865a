"""Plan of the measurements on a GPU: every row as a named job, in the order of what it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from kvcache_compress.bench.layers import SHAPES, Shape

from .check_static import GRAPHS

KEYS = {
    "bandwidth": ("cache",),
    "memory": ("cache",),
    "check": ("cache", "shape", "tokens"),
    "decode": ("cache", "shape", "batch", "tokens", "call"),
    "profile": ("cache", "shape", "batch", "tokens"),
    "tile": ("cache", "shape", "batch", "tokens", "block", "warps", "stages"),
    "models": ("cache", "batch", "tokens", "loop"),
    "graph": ("cache", "shape"),
    "longest": ("cache",),
    "prefill": ("cache", "tokens", "chunk"),
    "encode": ("cache", "shape", "batch", "tokens"),
}
"""Parts of the kit, with the fields that identify a row of each."""
PARALLEL = ("memory", "check")
"""Parts whose rows are not timed, and run in several processes."""
TARGETS = ("turboquant-4bit", "turboquant-2bit", "uniform-4bit", "kivi-2bit")
"""Presets that are checked, measured and profiled first, in the model's shape."""
DENSE = ("full", "none")
"""Caches of uncompressed keys and values: other libraries' attention, and our kernel's."""
UNCHECKED_PARTS = ("bandwidth", "memory", "check")
"""Parts whose rows need no check before them."""
CALLS = ("mask", "fixed")
TUNED, TUNED_TILES = ("turboquant-4bit", "kivi-2bit"), 6
"""Presets of which the kit times tiles, if none are named, and how many of each."""
LONGEST = ("turboquant-4bit", "turboquant-2bit")


class Job(NamedTuple):
    """Name of one row: its part, and the values of the part's fields in `KEYS`."""

    part: str
    values: tuple[str | int, ...]

    @property
    def named(self) -> dict[str, Any]:
        return dict(zip(KEYS[self.part], self.values, strict=True))

    @classmethod
    def of(cls, part: str, row: Mapping[str, Any]) -> Job:
        """Job of a row of a result file."""
        return cls(part, tuple(row[key] for key in KEYS[part]))

    def __str__(self) -> str:
        return " ".join(map(str, (self.part, *self.values)))


@dataclass(frozen=True)
class Sizes:
    """Shapes, batches and lengths of the measurements.

    shapes: shapes by name; the first one is also that of the model.
    main: batches and lengths of the decode rows that come first.
    batches, lengths: all batches and lengths of decode rows.
    uneven: tokens of a second check of the model's caches, which fill no complete tiles (but groups, if any).
    model: layers, hidden size and intermediate size of the model.
    prompt, chunks: tokens of the prompt of `prefill`, and chunk sizes.
    piece, most: tokens added at a time, and at most, to find the longest context.
    """

    shapes: Mapping[str, Shape]
    main: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    uneven: int
    encode_tokens: int
    model: tuple[int, int, int]
    model_batches: tuple[int, ...]
    model_lengths: tuple[int, ...]
    prompt: int
    chunks: tuple[int, ...]
    piece: int
    most: int
    repeats: int


SIZES = Sizes(
    SHAPES, ((8, 32_768), (32, 32_768), (1, 131_072), (1, 8_192)), (1, 8, 32), (8_192, 32_768, 131_072), 8_192 + 21,
    32_768, (32, 4096, 14336), (1, 8), (32_768, 8_192, 131_072), 32_768, (32_768, 4_096), 131_072, 1 << 23, 20,
)  # fmt: skip
SMALL_SIZES = Sizes(
    {"small": Shape(4, 2, 32)}, ((1, 64),), (1,), (64,), 64 + 21, 64, (2, 64, 64), (1,), (128,), 128, (128, 64), 128,
    256, 1,
)  # fmt: skip
MEMORY_SHAPE, MEMORY_TOKENS = Shape(4, 2, 128), 128
"""Size of the runs under a memory checker, which takes many times as long; the kernels are those of the model."""


def plan_jobs(
    presets: Sequence[str], parts: Iterable[str], sizes: Sizes, tiles: Mapping[str, Sequence[tuple[int, ...]]]
) -> list[Job]:
    """Jobs of these parts and the checks that they need, in order; `tiles` are those to time, by preset."""
    parts = {*parts}
    targets = [name for name in TARGETS if name in presets] or list(presets)[:1]
    ranked = [*targets, *(name for name in presets if name not in targets)]
    main, *others = sizes.shapes
    checked, large = sizes.lengths[0], sizes.main[0]
    order: list[tuple[str, Iterable[tuple[str | int, ...]]]] = [
        ("bandwidth", [("copy",)]),
        ("memory", [(name,) for name in ranked]),
        ("check", [(name, main, checked) for name in targets]),
        ("decode", [(name, main, *size, "plain") for size in sizes.main for name in (*DENSE, *targets)]),
        ("decode", [(name, main, *size, call) for size, call, name in product(sizes.main, CALLS, targets)]),
        ("profile", [(name, main, *large) for name in targets]),
        ("tile", [(name, main, *large, *tile) for name in presets for tile in tiles.get(name, ())]),
        ("models", _models(targets, sizes)),
        ("graph", [(name, main) for name in GRAPHS if name in presets]),
        ("longest", [("full",), *((name,) for name in LONGEST if name in presets)]),
        ("prefill", [(name, sizes.prompt, chunk) for chunk, name in product(sizes.chunks, ("full", *targets[:2]))]),
        ("check", [(name, main, tokens) for tokens, name in product((checked, sizes.uneven), ranked)]),
        ("decode", [(name, main, *size, "plain") for size in sizes.main for name in ranked]),
        ("encode", [(name, main, 1, sizes.encode_tokens) for name in ranked]),
        ("check", [(name, shape, checked) for shape, name in product(others, ranked)]),
        ("decode", [
            (*place, "plain")
            for place in product((*DENSE, *ranked), sizes.shapes, sizes.batches, sizes.lengths)
        ]),
        ("encode", [(name, shape, 1, sizes.encode_tokens) for shape, name in product(others, ranked)]),
    ]  # fmt: skip
    jobs = dict.fromkeys(Job(part, values) for part, rows in order for values in rows)
    needed: set[Job] = set()
    for job in (job for job in jobs if job.part in parts and job.part not in UNCHECKED_PARTS):
        needed.add(Job("check", (job.values[0], job.named.get("shape", main), checked)))
        if "shape" not in job.named:
            needed.add(Job("check", (job.values[0], main, sizes.uneven)))
    return [job for job in jobs if job.part in parts or job in needed]


def _models(targets: Sequence[str], sizes: Sizes) -> list[tuple[str | int, ...]]:
    """Rows of a whole model: each size with all caches, from a CUDA graph and not, before the next size."""
    rows = product(sizes.model_lengths, sizes.model_batches, ("graph", "eager"), ("full", *targets))
    return [(name, batch, tokens, loop) for tokens, batch, loop, name in rows]


class Checks:
    """Rows of the checks so far, by the kernels that they check."""

    def __init__(self, rows: Mapping[Job, Mapping[str, Any]]) -> None:
        self.rows: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        main = next((job.named["shape"] for job in rows if job.part == "check"), None)
        for job, row in rows.items():
            if job.part == "check":
                self.rows.setdefault((row["cache"], row["shape"]), []).append(row)
            elif job.part == "memory":
                self.rows.setdefault((row["cache"], main), []).append(row)
        self.main = main

    def of(self, job: Job) -> list[Mapping[str, Any]]:
        """Checks of a job's kernels, in its own shape, or in the model's; none if it needs none."""
        if job.part in UNCHECKED_PARTS or job.values[0] in DENSE:
            return []
        return self.rows.get((job.values[0], job.named.get("shape", self.main)), [])

    def failure(self, job: Job) -> str | None:
        """Reason why a job's time does not count, as a check of its kernels failed or none was reached, or None."""
        checks = self.of(job)
        wrong = [str(row["error"]) for row in checks if row.get("error") and not is_missing(row)]
        if wrong:
            return f"{FAILED} {wrong[0]}"
        return UNCHECKED if checks and all(is_missing(row) for row in checks) else None


def blocked(job: Job, rows: Mapping[Job, Mapping[str, Any]]) -> str | None:
    """Reason why a job is not begun: its kernels ended or hung the process that checked them."""
    errors = [str(row.get("error")) for row in Checks(rows).of(job)]
    return next((CHECK_FAILED + error for error in errors if error.startswith((ENDED, SILENT))), None)


NOT_MEASURED = "not measured:"
"""Prefix of the error of rows for which there was no time, or no tool; a later run measures them."""
ENDED, SILENT = "the measuring process ended:", "no result within"
"""Prefixes of the error of rows whose process died or hung, perhaps for another reason; a later run retries them."""
CHECK_FAILED = "not timed: check failed: "
FAILED, UNCHECKED = "check failed:", "its kernels were not checked"
"""Marks of rows whose times do not count."""


def is_missing(row: Mapping[str, Any]) -> bool:
    """True if there was no time or no tool for a row, or for its check."""
    return str(row.get("error")).removeprefix(CHECK_FAILED).startswith(NOT_MEASURED)


def planned_again(row: Mapping[str, Any]) -> bool:
    """True if a later run measures this row again: no time for it, or its process or its check's died or hung."""
    return is_missing(row) or str(row.get("error")).removeprefix(CHECK_FAILED).startswith((ENDED, SILENT))
