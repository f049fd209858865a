"""What the kit measures on a GPU: every row by name, the most important ones of each part first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from kvcache_compress.bench.layers import SHAPES, Shape

from .check_fixed import GRAPHS

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
"""The parts, in the order in which they run, and what tells a row from the others of its part."""
TUNING = dict.fromkeys(("try", "tile"), ("cache", "shape", "batch", "tokens", "block", "warps", "stages"))
"""The parts of tuning (`tune.py`): whether a tile is right, by several processes, and how fast it is."""
SHARES = {"bandwidth": 1, "decode": 45, "encode": 8, "models": 18, "prefill": 12, "longest": 14, "graph": 2}
"""Of the time that is left after the checks. What a part does not need is left to those after it."""
TARGETS = ("full", "turboquant-4bit", "turboquant-2bit", "uniform-4bit", "kivi-4bit", "kivi-2bit")
"""Whose decoding is asked for first, over at least `TARGET_BATCH` sequences of at least `TARGET_TOKENS`."""
TARGET_BATCH, TARGET_TOKENS = 8, 32_768
MODELS = ("turboquant-4bit", "turboquant-2bit", "turboquant-3bit", "turboquant-k3v2")
LONGEST = ("turboquant-4bit", "turboquant-2bit")
DENSE = ("full", "flash_attn", "flashinfer")
"""Caches that none of our kernels reads."""


def _keys(part: str) -> tuple[str, ...]:
    return KEYS[part] if part in KEYS else TUNING[part]


class Job(NamedTuple):
    """One row: the part, and the values of `KEYS` or `TUNING`."""

    part: str
    values: tuple[str | int, ...]

    @property
    def named(self) -> dict[str, Any]:
        return dict(zip(_keys(self.part), self.values, strict=True))

    @classmethod
    def of(cls, part: str, row: Mapping[str, Any]) -> Job:
        """The job that a row of a result file comes from."""
        return cls(part, tuple(row[key] for key in _keys(part)))

    def __str__(self) -> str:
        return " ".join(map(str, (self.part, *self.values)))


@dataclass(frozen=True)
class Sizes:
    """What is measured; the first shape is that of the whole model, of `layers` layers and these widths."""

    shapes: Mapping[str, Shape]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    uneven: int
    """Tokens of a second check of the model's caches, which fill no whole tiles (but groups, where there are any)."""
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
    """The rows of these parts and the checks that they need, part by part, the most important first.

    `libraries` are those beside PyTorch whose attention over uncompressed keys and values is measured.
    """
    ranked = sorted(presets, key=lambda name: TARGETS.index(name) if name in TARGETS else len(TARGETS))
    main, *others = sizes.shapes
    in_models = [name for name in MODELS if name in presets] or ranked[:1]
    longest = [name for name in LONGEST if name in presets] or ranked[:1]
    found: dict[str, list[tuple[str | int, ...]]] = {"bandwidth": [("copy",)]}
    decode = product(("full", *libraries, *ranked), sizes.shapes, sizes.batches, sizes.lengths)
    found["decode"] = sorted(decode, key=lambda values: _rank(main, values))
    found["encode"] = [(name, shape, 1, sizes.encode_tokens) for shape, name in product((main, *others), ranked)]
    found["models"] = [(name, 1, tokens) for tokens, name in product(sizes.model_lengths, ("full", *in_models))]
    found["prefill"] = [(name, sizes.prompt, chunk) for chunk, name in product(sizes.chunks, ("full", *in_models))]
    found["longest"] = [(name,) for name in ("full", *longest)]
    found["graph"] = [(name, main) for name in GRAPHS if name in presets]
    jobs = [Job(part, values) for part in KEYS if part in parts and part in found for values in found[part]]
    checks = [(name, main, sizes.lengths[0]) for name in ranked]
    if {"check", "models", "prefill", "longest"} & {*parts}:
        checks += [(name, main, sizes.uneven) for name in in_models]
    checks += [(name, shape, sizes.lengths[0]) for shape, name in product(others, ranked)]
    wanted = {need for job in jobs for need in needs(job, main)}
    return [Job("check", values) for values in checks if "check" in parts or values[:2] in wanted] + jobs


def _rank(main: str, values: tuple[Any, ...]) -> tuple[bool, bool, bool]:
    """Sorts decoding: the main shape first, in it what is long enough, and there the targets' caches."""
    cache, shape, batch, tokens = values
    small = batch < TARGET_BATCH or tokens < TARGET_TOKENS
    target = cache in TARGETS or cache in DENSE
    return shape != main, small and shape == main, not target


def needs(job: Job, main: str) -> set[tuple[str, str]]:
    """Preset and shape whose check must have passed before a job may be timed."""
    cache = str(job.values[0])
    if job.part in ("check", "bandwidth") or cache in DENSE:
        return set()
    return {(cache, job.named.get("shape", main))}


def without_check(job: Job, rows: Mapping[Job, Mapping[str, Any]], main: str) -> str | None:
    """Why a job may not be timed, given the rows so far; None where its preset's kernels are known to be right."""
    for cache, shape in needs(job, main):
        checks = [row for key, row in rows.items() if key.part == "check" and key.values[:2] == (cache, shape)]
        if not checks or any(str(row.get("error")).startswith(NOT_MEASURED) for row in checks):
            return f"{NOT_MEASURED} its kernels were not checked"
        if failed := [row["error"] for row in checks if row.get("error") is not None]:
            return CHECK_FAILED + str(failed[0])
    return None


NOT_MEASURED = "not measured:"
"""How the errors of rows begin for which there was no time; a later run measures them."""
ENDED, SILENT = "the measuring process ended:", "no result within"
"""How the errors of rows begin whose process died or hung, which need not be theirs; a later run measures them too."""
CHECK_FAILED = "not timed: check failed: "


def planned_again(row: Mapping[str, Any]) -> bool:
    """Whether a later run measures a row that is in the file; also one whose check's process died or hung."""
    return str(row.get("error")).removeprefix(CHECK_FAILED).startswith((NOT_MEASURED, ENDED, SILENT))
