"""Worker process that measures on the GPU and prints each row as a line of JSON, so that none is lost if it dies.

After an illegal memory access a CUDA context is unusable, and a crash or a hanging kernel takes down its process.
Measuring in a separate process, which is restarted for the remaining rows, covers all of these; the supervising process
writes the file (`benchmarks/gpu.py`).

    python -P -m gpu_kit.worker < JOBS

`JOBS` is `{"jobs": [[part, [values]]], "seconds": 400, "small": false}`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TextIO

import torch

from kvcache_compress.bench.decode import compressed_time, full_time, random_view
from kvcache_compress.bench.timing import CopyBandwidth, copy_bandwidth
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import error_message

from .check import check_kernels
from .check_static import graph_check
from .encode import encode_time
from .jobs import MEMORY_SHAPE, MEMORY_TOKENS, SIZES, SMALL_SIZES, Job, Sizes
from .models import longest_context, model_time, prefill_time, random_llama
from .tiles import Tile, time_tile

Emit = Callable[[dict[str, Any]], None]
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Profiled:
    """A layer's attention was called for the profiler, which reads the counters of its second launch."""

    cache: str
    error: str | None = None


def run_jobs(jobs: Sequence[Job], measure: Callable[[Job], Any], late: Callable[[], bool], emit: Emit) -> bool:
    """Run jobs until it is late. Emits `{"begin": job}` before each and `{"row": ...}` after it, with its `error`.

    Returns:
        False if the device no longer works.
    """
    return all(late() or _run(job, measure, emit) for job in jobs)


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
        if job.part == "memory":
            return check_kernels(name, "memory", MEMORY_SHAPE, MEMORY_TOKENS, self.device)
        if shape is not None:
            if job.part == "check":
                steps = named["tokens"] != sizes.uneven  # which do not depend on the number of tokens
                return check_kernels(name, shape_name, shape, named["tokens"], self.device, steps=steps)
            if job.part == "graph":
                return graph_check(name, shape_name, shape, self.device)
            call = (name, shape_name, shape, named["batch"], named["tokens"], self.device)
            if job.part == "tile":
                return time_tile(*call, Tile(named["block"], named["warps"], named["stages"]), sizes.repeats)
            if job.part == "encode":
                return encode_time(*call, repeats=max(1, sizes.repeats // 4))
            if job.part == "profile":
                view, query = random_view(name, shape, *call[3:], torch.bfloat16)
                for _ in range(3):
                    view.attend(AttentionCall.of(query, scaling=shape.head_dim**-0.5))
                return Profiled(name)
            if name == "full":
                return full_time(*call[1:], torch.bfloat16, sizes.repeats)
            return compressed_time(*call, torch.bfloat16, sizes.repeats, named["call"])
        if job.part == "bandwidth":
            return CopyBandwidth(copy_bandwidth(self.device))
        if job.part == "models":
            return model_time(self.model, name, named["batch"], named["tokens"], named["loop"])
        if job.part == "prefill":
            return prefill_time(self.model, name, named["tokens"], named["chunk"])
        return longest_context(self.model, name, sizes.piece, sizes.most, self.late)


def main(source: TextIO, out: TextIO) -> int:
    """Run the jobs read from `source`; returns 1 if the device stopped working, so that another process must go on."""
    task = json.load(source)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    end = time.monotonic() + task["seconds"]

    def late() -> bool:
        return time.monotonic() >= end

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=out, flush=True)

    measure = Measurements(SMALL_SIZES if task["small"] else SIZES, device, late)
    jobs = [Job(part, tuple(values)) for part, values in task["jobs"]]
    return 0 if run_jobs(jobs, measure, late, emit) else 1


if __name__ == "__main__":
    # Libraries may print to standard output: keep it for the rows, and send their output to standard error.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, rows))
