"""Which tiles of the attention kernel are fastest on this GPU: measures them, and writes those that pay to the package.

    make tune-gpu                                   # all presets, within an hour
    python benchmarks/tune.py --preset kivi-2bit    # of one; goes on where an earlier run of the same code stopped
    python benchmarks/tune.py --small --output F --table T --preset kivi-2bit    # without a GPU (TRITON_INTERPRET=1)

Every tile that the sides of a preset can take is first compiled, in several processes, and compared with plain
attention; what is right and spills no registers is then timed in turns with the tile that the package chooses by rule.
`triton_kernels/tiles.json` gets an entry for each kernel that another tile makes faster by more than 3 %, with both
times; what all tiles took is in `benchmarks/results/tiles.json`, which holds every row as soon as it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

if find_spec("pydantic") is None:
    raise SystemExit("pydantic is missing, which the package's configurations are made of: pip install pydantic")

from gpu_kit.jobs import SIZES, SMALL_SIZES, TARGETS, TUNING, Job
from gpu_kit.result_file import ResultFile, hash_sources, measured
from gpu_kit.supervise import measure_all, measure_in_parallel
from gpu_kit.tune import BATCH, SMALL, TOKENS, Case, best_tiles, plan_cases, update_table, without_try

from kvcache_compress.bench.layers import VARIANTS
from kvcache_compress.codecs.backend import interpreting
from kvcache_compress.config import preset_names
from kvcache_compress.eval.provenance.results import circumstances, git_commit
from kvcache_compress.triton_kernels.attention.tiles import capability_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tiles.json"
TABLE = ROOT / "triton_kernels" / "attention" / "tiles.json"
TRY_SHARE = 0.6
"""Of the time, at most, for compiling and comparing."""
COMPILERS = 16


def run(results: ResultFile, minutes: float, small: bool) -> None:
    """Tries tiles, then times those that are right, within so many minutes from now."""
    end = time.monotonic() + 60 * minutes

    def keep(job: Job, row: dict[str, Any]) -> None:
        results.keep(job, row)
        if job.part == "tile" or row.get("error") is not None:
            print(line(job, row), flush=True)

    tries = [job for job in results.jobs if job.part == "try"]
    measure_in_parallel(tries, 1 if small else COMPILERS, 60 * minutes * TRY_SHARE, small, keep)
    ready: list[Job] = []
    for job in (job for job in results.jobs if job.part == "tile"):
        problem = without_try(job, results.rows)
        if problem is None:
            ready.append(job)
        else:
            results.keep(job, job.named | {"error": problem})
    measure_all(ready, end - time.monotonic(), small, keep)


def line(job: Job, row: dict[str, Any]) -> str:
    """A row in one line."""
    if row.get("error") is not None:
        return f"{job}: {row['error']}"
    figures = f"{row['milliseconds']:.3f} ms, by rule {row['rule_milliseconds']:.3f} ms"
    return f"{job}: {figures}, at most {row['ratio']:.3f}x"


def report(cases: Sequence[Case], found: dict[str, dict[str, Any] | None]) -> str:
    """What was found for each kernel, in a line."""
    lines = []
    for case in {case.kernel: case for case in cases}.values():
        entry = found.get(case.kernel)
        if case.kernel not in found:
            text = "not all of its tiles were measured, or none was right"
        elif entry is None:
            text = f"stays with {tuple(case.rule)}"
        else:
            ratio = max(one["ratio"] for one in entry["measured"])
            text = f"{tuple(entry['tile'].values())} in {ratio:.3f} of the time of {tuple(case.rule)}"
        lines.append(f"{case.cache}, {case.shape}: {text}")
    return "\n".join(lines)


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file for all times; the committed one by default.")] = None,
    table: Annotated[Path | None, typer.Option(help="The table to change; the package's own by default.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes; runs without a GPU.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to tune; all by default.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Time for all of it.")] = 60.0,
) -> None:
    """Measures tiles on the device and writes the table."""
    on_gpu = torch.cuda.is_available()
    if not small and (not on_gpu or interpreting()):
        raise typer.BadParameter("no GPU here, or TRITON_INTERPRET is set: only --small runs then")
    if small and (output is None or table is None):
        raise typer.BadParameter("--output and --table are needed for --small")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    capability = capability_of(device)
    if not small and capability is None:
        raise typer.BadParameter("no GPU of NVIDIA's: for others there is no table")
    presets = preset or sorted([*VARIANTS, *preset_names()], key=lambda name: name not in TARGETS)
    cases = plan_cases(presets, (SMALL_SIZES if small else SIZES).shapes, small)
    size = SMALL if small else (BATCH, TOKENS)
    jobs = [case.job(part, tile, size) for part in TUNING for case in cases for tile in case.others]
    where = circumstances(device) | {"commit": git_commit(__file__), "small": small, "minutes": minutes}
    # Not of the table that is written here: a run that goes on finds it changed.
    where |= {"sources": hash_sources(ROOT, ("*.py", "*.yaml"))}
    results = ResultFile(output or RESULTS, where, jobs, tuple(TUNING))
    if results.differs:
        print(f"begun anew, the old file is kept beside it: other {results.differs}")
    try:
        run(results, minutes, small)
        results.close()
    finally:
        found = best_tiles(cases, results.rows, size)
        # Without a GPU under a name that no device has.
        update_table(table or TABLE, capability or "none", found, said_of_each(where))
        left = sum(not measured(row) for row in results.rows.values())
        print(f"{report(cases, found)}\n{left} rows not measured\nwritten: {results.path}, {table or TABLE}")


def said_of_each(where: dict[str, Any]) -> dict[str, Any]:
    """What tells where an entry of the table comes from."""
    return {
        "accelerator": where["hardware"]["accelerator"],
        "date": where["date"],
        "commit": where["commit"],
        "triton": where["versions"]["triton"],
    }


if __name__ == "__main__":
    typer.run(main)
