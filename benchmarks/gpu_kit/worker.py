"""Worker process that measures on the GPU and prints each row as a line of JSON, so that none is lost if it dies.

After an illegal memory access a CUDA context is unusable, and a crash or a hanging kernel takes down its process.
Measuring in a separate process, which is restarted for the remaining rows, covers all of these; the supervising process
writes the file (`benchmarks/gpu.py`).

    python -P -m gpu_kit.worker < JOBS

`JOBS` is `{"jobs": [[part, [values]]], "late": [], "seconds": 400, "small": false}`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, TextIO

import torch

from kvcache_compress.bench.decode import compressed_time, full_time
from kvcache_compress.bench.timing import CopyBandwidth, copy_bandwidth
from kvcache_compress.eval.provenance.results import error_message

from .check import check_kernels
from .check_static import graph_check
from .encode import encode_time
from .jobs import DENSE, SHARES, SIZES, SMALL_SIZES, TUNING, Job, Sizes
from .models import model_time, random_llama
from .prompts import longest_context, prefill_time
from .tune import try_tile

Emit = Callable[[dict[str, Any]], None]
LONGEST_MESSAGE = 300


class Budget:
    """Time budget of the parts: each gets its share of the time left when it begins, and no more."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = clock() + seconds
        self.until = self.end

    def begin(self, part: str, later: Sequence[str]) -> None:
        """Begin the time of `part`; `later` are the parts after it."""
        share = SHARES.get(part, 1) / sum(SHARES.get(name, 1) for name in (part, *later))
        self.until = self.clock() + max(0.0, self.end - self.clock()) * share

    def take_rest(self) -> None:
        """Allow all remaining time, as no part follows."""
        self.until = self.end

    def over(self) -> bool:
        return self.clock() >= self.until


def run_jobs(
    jobs: Sequence[Job],
    measure: Callable[[Job], Any],
    budget: Budget,
    emit: Emit,
    already_late: Sequence[Job] = (),
) -> bool:
    """Run jobs part by part, each part within its share of time, and late jobs at the end in the time left.

    Emits `{"begin": job}` before each job and `{"row": ...}` after it; a failed job gives a row with its `error`.
    `already_late`: jobs of parts that used their share in an earlier process.

    Returns:
        False if the device no longer works.
    """
    late = list(already_late)
    parts = list(dict.fromkeys(job.part for job in jobs))
    for place, part in enumerate(parts):
        budget.begin(part, parts[place + 1 :])
        for job in jobs:
            if job.part != part:
                continue
            if budget.over():
                late.append(job)
            elif not _run(job, measure, emit):
                return False
    budget.take_rest()
    return all(budget.over() or _run(job, measure, emit) for job in late)


def _run(job: Job, measure: Callable[[Job], Any], emit: Emit) -> bool:
    """Run one job; False if the device no longer works after it."""
    emit({"begin": job})
    try:
        row = job.named | asdict(measure(job))
    except Exception as error:
        row = job.named | {"error": one_line(error)}
    emit({"row": row})
    if row.get("error") is None:
        return True
    gc.collect()
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def one_line(error: Exception) -> str:
    """Error in one line, with its root cause, which says more if Triton quotes a complete kernel first."""
    root: BaseException = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    text = error_message(error)
    if root is not error:
        text = f"{text[: LONGEST_MESSAGE // 2]} ... {' '.join(f'{type(root).__name__}: {root}'.split())}"
    return text[:LONGEST_MESSAGE]


class Measurements:
    """Callable that runs single jobs; the model is created when the first job needs it."""

    def __init__(self, sizes: Sizes, device: torch.device, late: Callable[[], bool]) -> None:
        self.sizes, self.device, self.late = sizes, device, late

    @cached_property
    def model(self) -> Any:
        torch.cuda.empty_cache()
        return random_llama(next(iter(self.sizes.shapes.values())), *self.sizes.model, self.device)

    def __call__(self, job: Job) -> Any:
        torch.manual_seed(0)
        sizes, named = self.sizes, job.named
        name, shape_name = named["cache"], named.get("shape", "")
        shape = sizes.shapes.get(shape_name)
        if shape is not None:
            if job.part == "check":
                return check_kernels(name, shape_name, shape, named["tokens"], self.device)
            if job.part == "graph":
                return graph_check(name, shape_name, shape, self.device)
            call = (name, shape_name, shape, named["batch"], named["tokens"], self.device)
            if job.part in TUNING:
                tile = (named["block"], named["warps"], named["stages"])
                return try_tile(*call, tile, timed=job.part == "tile", repeats=sizes.repeats)
            if job.part == "encode":
                return encode_time(*call, repeats=max(2, sizes.repeats // 4))
            return (full_time if name in DENSE else compressed_time)(*call, torch.bfloat16, sizes.repeats)
        if job.part == "bandwidth":
            return CopyBandwidth(copy_bandwidth(self.device))
        if job.part == "models":
            return model_time(self.model, name, named["batch"], named["tokens"])
        if job.part == "prefill":
            return prefill_time(self.model, name, named["tokens"], named["chunk"])
        return longest_context(self.model, name, sizes.piece, sizes.most, self.late)


def main(source: TextIO, out: TextIO) -> int:
    """Run the jobs read from `source`; returns 1 if the device stopped working, so that another process must go on."""
    task = json.load(source)
    jobs, late = ([Job(part, tuple(values)) for part, values in task[name]] for name in ("jobs", "late"))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    budget = Budget(task["seconds"])
    measure = Measurements(SMALL_SIZES if task["small"] else SIZES, device, budget.over)

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    return 0 if run_jobs(jobs, measure, budget, emit, late) else 1


if __name__ == "__main__":
    # Libraries may print to standard output: keep it for the rows, and send their output to standard error.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, rows))
