"""The process that measures on the GPU: rows come out one by one, as lines of JSON, so that none is lost with it.

After an illegal memory access a CUDA context answers nothing any more, and a crash or a kernel that hangs takes the
whole process. Measuring in a process of its own, which is started again for the rows that are left, covers all of
these by the same few lines; the file is written by the process that waits (`benchmarks/gpu.py`).

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
from .check_fixed import graph_check
from .encode import encode_time
from .jobs import DENSE, SHARES, SIZES, SMALL_SIZES, TUNING, Job, Sizes
from .models import model_time, random_llama
from .prompts import longest_context, prefill_time
from .tune import try_tile

Emit = Callable[[dict[str, Any]], None]
LONGEST_MESSAGE = 300


class Budget:
    """Seconds for a number of parts: each gets its share of what is left when it begins, and no more."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.end = clock() + seconds
        self.until = self.end

    def begin(self, part: str, later: Sequence[str]) -> None:
        """The time of `part` begins; `later` are the parts that are still to come."""
        share = SHARES.get(part, 1) / sum(SHARES.get(name, 1) for name in (part, *later))
        self.until = self.clock() + max(0.0, self.end - self.clock()) * share

    def take_rest(self) -> None:
        """No part after this one: all that is left may be used."""
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
    """Runs jobs part by part, each within its share, and at the end those that were late in what the others left.

    `already_late`: those of parts that had their share in an earlier process.
    Emits `{"begin": job}` before each and `{"row": ...}` after it; a job that fails is a row that says why. False
    where the device does not work any more.
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
    """Whether the device still works after the job."""
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
    """What went wrong; and the error at the bottom of it, which says more where Triton quotes a whole kernel first."""
    root: BaseException = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    text = error_message(error)
    if root is not error:
        text = f"{text[: LONGEST_MESSAGE // 2]} ... {' '.join(f'{type(root).__name__}: {root}'.split())}"
    return text[:LONGEST_MESSAGE]


class Measurements:
    """Runs single jobs; the whole model is made when the first one needs it."""

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


def main(given: TextIO, out: TextIO) -> int:
    """Runs the jobs that `given` names; 1 where the device stopped working, so that another process must go on."""
    task = json.load(given)
    jobs, late = ([Job(part, tuple(values)) for part, values in task[name]] for name in ("jobs", "late"))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    budget = Budget(task["seconds"])
    measure = Measurements(SMALL_SIZES if task["small"] else SIZES, device, budget.over)

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    return 0 if run_jobs(jobs, measure, budget, emit, late) else 1


if __name__ == "__main__":
    # Whatever libraries print goes elsewhere than the rows.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, rows))
