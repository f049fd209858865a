"""Plan of the measurements on a GPU: every row as a named job, the most important of each part first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from kvcache_compress.bench.layers import SHAPES, Shape

from .check_static import GRAPHS

KEYS = {
    "check": ("cache", "shape", "tokens"),
    "bandwidth": ("cache",),
    "decode": ("cache", "shape", "batch", "tokens"),
    "encode": ("cache", "shape", "batch", "tokens"),
    "models": ("cache", "batch", "tokens"),
    "prefill": ("cache", "tokens", "chunk"),
    "longest": ("cache",),
    "graph": ("cache", "shape"),
}
"""Parts, in the order in which they run, with the fields that identify a row of each."""
TUNING = dict.fromkeys(("try", "tile"), ("cache", "shape", "batch", "tokens", "block", "warps", "stages"))
"""Parts of tuning (`tune.py`): `try` checks a tile, in several processes; `tile` times it."""
SHARES = {"bandwidth": 1, "decode": 45, "encode": 8, "models": 18, "prefill": 12, "longest": 14, "graph": 2}
"""Shares of the time after the checks; what a part does not use is left to the parts after it."""
TARGETS = ("full", "turboquant-4bit", "turboquant-2bit", "uniform-4bit", "kivi-4bit", "kivi-2bit")
"""Caches whose decoding is measured first, for at least `TARGET_BATCH` sequences of at least `TARGET_TOKENS`."""
TARGET_BATCH, TARGET_TOKENS = 8, 32_768
MODELS = ("turboquant-4bit", "turboquant-2bit", "turboquant-3bit", "turboquant-k3v2")
LONGEST = ("turboquant-4bit", "turboquant-2bit")
DENSE = ("full", "flash_attn", "flashinfer")
"""Caches of uncompressed keys and values, which do not need a kernel check."""


def _keys(part: str) -> tuple[str, ...]:
    return KEYS[part] if part in KEYS else TUNING[part]


class Job(NamedTuple):
    """Name of one row: its part, and the values of the part's fields in `KEYS` or `TUNING`."""

    part: str
    values: tuple[str | int, ...]

    @property
    def named(self) -> dict[str, Any]:
        return dict(zip(_keys(self.part), self.values, strict=True))

    @classmethod
    def of(cls, part: str, row: Mapping[str, Any]) -> Job:
        """Job of a row of a result file."""
        return cls(part, tuple(row[key] for key in _keys(part)))

    def __str__(self) -> str:
        return " ".join(map(str, (self.part, *self.values)))


@dataclass(frozen=True)
class Sizes:
    """Shapes, batches and lengths of the measurements.

    shapes: shapes by name; the first one is also that of the model.
    uneven: tokens of a second check of the model's caches, which fill no complete tiles (but groups, if any).
    model: layers, hidden size and intermediate size of the model.
    prompt, chunks: tokens of the prompt of `prefill`, and chunk sizes.
    piece, most: tokens added at a time, and at most, to find the longest context.
    """

    shapes: Mapping[str, Shape]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    uneven: int
    encode_tokens: int
    model: tuple[int, int, int]
    model_lengths: tuple[int, ...]
    prompt: int
    chunks: tuple[int, ...]
    piece: int
    most: int
    repeats: int


SIZES = Sizes(
    SHAPES, (1, 8, 32), (8_192, 32_768, 131_072), 8_192 + 21, 32_768, (32, 4096, 14336), (8_192, 32_768, 131_072),
    32_768, (32_768, 4_096), 131_072, 1 << 23, 20,
)  # fmt: skip
SMALL_SIZES = Sizes(
    {"small": Shape(4, 2, 64)}, (1,), (128,), 128 + 21, 128, (2, 64, 64), (160,), 160, (160, 64), 128, 256, 2
)  # fmt: skip


def plan_jobs(presets: Sequence[str], parts: Sequence[str], sizes: Sizes, libraries: Sequence[str] = ()) -> list[Job]:
    """Jobs of these parts and the checks that they need, part by part, the most important first.

    `libraries`: libraries other than PyTorch whose attention over uncompressed keys and values is measured.
    """
    ranked = sorted(presets, key=lambda name: TARGETS.index(name) if name in TARGETS else len(TARGETS))
    main, *others = sizes.shapes
    in_models = [name for name in MODELS if name in presets] or ranked[:1]
    longest = [name for name in LONGEST if name in presets] or ranked[:1]
    by_part: dict[str, list[tuple[str | int, ...]]] = {"bandwidth": [("copy",)]}
    decode = product(("full", *libraries, *ranked), sizes.shapes, sizes.batches, sizes.lengths)
    by_part["decode"] = sorted(decode, key=lambda values: _rank(main, values))
    by_part["encode"] = [(name, shape, 1, sizes.encode_tokens) for shape, name in product((main, *others), ranked)]
    by_part["models"] = [(name, 1, tokens) for tokens, name in product(sizes.model_lengths, ("full", *in_models))]
    by_part["prefill"] = [(name, sizes.prompt, chunk) for chunk, name in product(sizes.chunks, ("full", *in_models))]
    by_part["longest"] = [(name,) for name in ("full", *longest)]
    by_part["graph"] = [(name, main) for name in GRAPHS if name in presets]
    jobs = [Job(part, values) for part in KEYS if part in parts and part in by_part for values in by_part[part]]
    checks = [(name, main, sizes.lengths[0]) for name in ranked]
    if {"check", "models", "prefill", "longest"} & {*parts}:
        checks += [(name, main, sizes.uneven) for name in in_models]
    checks += [(name, shape, sizes.lengths[0]) for shape, name in product(others, ranked)]
    wanted = {need for job in jobs for need in needs(job, main)}
    return [Job("check", values) for values in checks if "check" in parts or values[:2] in wanted] + jobs


def _rank(main: str, values: tuple[Any, ...]) -> tuple[bool, bool, bool]:
    """Sort key of decode jobs: the main shape first, there large sizes first, and of these the targets' caches."""
    cache, shape, batch, tokens = values
    small = batch < TARGET_BATCH or tokens < TARGET_TOKENS
    target = cache in TARGETS or cache in DENSE
    return shape != main, small and shape == main, not target


def needs(job: Job, main: str) -> set[tuple[str, str]]:
    """Preset and shape whose check must pass before a job may be timed."""
    cache = str(job.values[0])
    if job.part in ("check", "bandwidth") or cache in DENSE:
        return set()
    return {(cache, job.named.get("shape", main))}


def without_check(job: Job, rows: Mapping[Job, Mapping[str, Any]], main: str) -> str | None:
    """Reason why a job may not be timed, given the rows so far; None if its kernels passed their checks."""
    for cache, shape in needs(job, main):
        checks = [row for key, row in rows.items() if key.part == "check" and key.values[:2] == (cache, shape)]
        if not checks or any(str(row.get("error")).startswith(NOT_MEASURED) for row in checks):
            return f"{NOT_MEASURED} its kernels were not checked"
        if failed := [row["error"] for row in checks if row.get("error") is not None]:
            return CHECK_FAILED + str(failed[0])
    return None


NOT_MEASURED = "not measured:"
"""Prefix of the error of rows for which there was no time; a later run measures them."""
ENDED, SILENT = "the measuring process ended:", "no result within"
"""Prefixes of the error of rows whose process died or hung, perhaps for another reason; a later run retries them."""
CHECK_FAILED = "not timed: check failed: "


def planned_again(row: Mapping[str, Any]) -> bool:
    """True if a later run measures this row again: no time for it, or its process or its check's died or hung."""
    return str(row.get("error")).removeprefix(CHECK_FAILED).startswith((NOT_MEASURED, ENDED, SILENT))
