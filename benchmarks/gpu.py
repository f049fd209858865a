"""Check the kernels on a GPU, then measure them, with one command and within eight minutes.

    make bench-gpu                                # all checks and measurements, to benchmarks/results/gpu.json
    python benchmarks/gpu.py --small --output F   # every part with tiny sizes, also without a GPU (TRITON_INTERPRET=1)
    python benchmarks/gpu.py --output F           # continues an earlier run of the same code
    python benchmarks/gpu.py --output F --table   # prints the contents of F

Each preset's kernels are compared with PyTorch's operators on the device, in several processes, as most of that time
goes into compiling the kernels; a preset that fails, or was not reached, is not timed. Rows are measured by a process
that is restarted if it dies (`gpu_kit/worker.py`), and each row is in the file as soon as it is measured.
`gpu_kit/jobs.py` has the shares of time and the order within each part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

if find_spec("pydantic") is None:
    raise SystemExit("pydantic is missing, which the package's configurations need: pip install pydantic")

from gpu_kit.gpu_table import line, tables
from gpu_kit.jobs import KEYS, SIZES, SMALL_SIZES, Job, plan_jobs, without_check
from gpu_kit.result_file import ResultFile, hash_sources
from gpu_kit.supervise import measure_all, measure_in_parallel

from kvcache_compress.bench.layers import VARIANTS
from kvcache_compress.bench.peers import installed
from kvcache_compress.codecs.backend import interpreting
from kvcache_compress.config import preset_names
from kvcache_compress.eval.provenance.results import circumstances, git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
CHECK_SHARE = 0.4
"""Largest share of the time for the checks, including compilation."""
CHECKERS = 8


def run(results: ResultFile, minutes: float, small: bool, main_shape: str) -> None:
    """Check the kernels, then measure those that may be timed, within `minutes` from now."""
    end = time.monotonic() + 60 * minutes

    def keep(job: Job, row: dict[str, Any]) -> None:
        results.keep(job, row)
        print(line(job.part, row), flush=True)

    checks = [job for job in results.jobs if job.part == "check"]
    measure_in_parallel(checks, 1 if small else CHECKERS, 60 * minutes * CHECK_SHARE, small, keep)
    ready: list[Job] = []
    for job in (job for job in results.jobs if job.part != "check"):
        problem = without_check(job, results.rows, main_shape)
        if problem is None:
            ready.append(job)
        else:
            results.keep(job, job.named | {"error": problem})
    measure_all(ready, end - time.monotonic(), small, keep)


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file; the committed one by default.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes; runs without a GPU.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to measure; all by default.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(KEYS)}; all by default.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes for the complete run.")] = 8.0,
    table: Annotated[bool, typer.Option("--table", help="Only print what the file holds.")] = False,
) -> None:
    """Check the kernels on the device and measure them."""
    if table:
        print(tables(json.loads((output or RESULTS).read_text(encoding="utf-8"))))
        return
    on_gpu = torch.cuda.is_available()
    if not small and (not on_gpu or interpreting()):
        raise typer.BadParameter("no GPU here, or TRITON_INTERPRET is set: only --small runs then")
    if output is None and (small or preset or part):
        raise typer.BadParameter("--output is needed for --small, --preset and --part")
    parts: Sequence[str] = part or [*KEYS]
    if unknown := {*parts} - {*KEYS}:
        raise typer.BadParameter(f"--part {', '.join(sorted(unknown))}: allowed {', '.join(KEYS)}")
    presets = preset or (["turboquant-4bit", "kivi-2bit"] if small else [*VARIANTS, *preset_names()])
    sizes = SMALL_SIZES if small else SIZES
    where = circumstances(torch.device("cuda" if on_gpu else "cpu"), "flash-attn", "flashinfer-python")
    where |= {"commit": git_commit(__file__), "sources": hash_sources(ROOT), "small": small, "minutes": minutes}
    jobs = plan_jobs(presets, parts, sizes, installed() if on_gpu else ())
    results = ResultFile(output or RESULTS, where, jobs)
    if results.differs:
        print(f"new file, the old one is kept next to it: other {results.differs}")
    try:
        run(results, minutes, small, next(iter(sizes.shapes)))
        results.close()
    finally:
        print(tables(results.contents()))
        print(f"written: {results.path}")


if __name__ == "__main__":
    typer.run(main)
