"""Tune the attention kernel on this GPU: measure its tiles, and write the fastest to the package if they pay off.

    make tune-gpu                                   # all presets, within an hour
    python benchmarks/tune.py --preset kivi-2bit    # one preset; continues an earlier run of the same code
    python benchmarks/tune.py --small --output F --table T --preset kivi-2bit    # without a GPU (TRITON_INTERPRET=1)

Every tile that a preset supports is first compiled, in several processes, and compared with plain attention; correct
tiles that spill no registers are then timed in turns with the tile that the package chooses by rule.
`triton_kernels/attention/tiles.json` gets an entry, with both times, for each kernel that another tile makes more than
3 % faster; the times of all tiles are in `benchmarks/results/tiles.json`, which holds every row once it is measured.
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
    raise SystemExit("pydantic is missing, which the package's configurations need: pip install pydantic")

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
"""Largest share of the time for compiling and comparing."""
COMPILERS = 16


def run(results: ResultFile, minutes: float, small: bool) -> None:
    """Check tiles, then time those that are right, within `minutes` from now."""
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
    """Format a row as one line."""
    if row.get("error") is not None:
        return f"{job}: {row['error']}"
    figures = f"{row['milliseconds']:.3f} ms, by rule {row['rule_milliseconds']:.3f} ms"
    return f"{job}: {figures}, at most {row['ratio']:.3f}x"


def report(cases: Sequence[Case], entries: dict[str, dict[str, Any] | None]) -> str:
    """Report of the chosen tile, a line per kernel."""
    lines = []
    for case in {case.kernel: case for case in cases}.values():
        entry = entries.get(case.kernel)
        if case.kernel not in entries:
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
    table: Annotated[Path | None, typer.Option(help="Table to change; by default the package's.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes; runs without a GPU.")] = False,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to tune; all by default.")] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes for the complete run.")] = 60.0,
) -> None:
    """Measure tiles on the device and write the table."""
    on_gpu = torch.cuda.is_available()
    if not small and (not on_gpu or interpreting()):
        raise typer.BadParameter("no GPU here, or TRITON_INTERPRET is set: only --small runs then")
    if small and (output is None or table is None):
        raise typer.BadParameter("--output and --table are needed for --small")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    capability = capability_of(device)
    if not small and capability is None:
        raise typer.BadParameter("no NVIDIA GPU: there are no tables for others")
    presets = preset or sorted([*VARIANTS, *preset_names()], key=lambda name: name not in TARGETS)
    cases = plan_cases(presets, (SMALL_SIZES if small else SIZES).shapes, small)
    size = SMALL if small else (BATCH, TOKENS)
    jobs = [case.job(part, tile, size) for part in TUNING for case in cases for tile in case.others]
    where = circumstances(device) | {"commit": git_commit(__file__), "small": small, "minutes": minutes}
    # Without the table that is written here, which would differ when a run is continued.
    where |= {"sources": hash_sources(ROOT, ("*.py", "*.yaml"))}
    results = ResultFile(output or RESULTS, where, jobs, tuple(TUNING))
    if results.differs:
        print(f"new file, the old one is kept next to it: other {results.differs}")
    try:
        run(results, minutes, small)
        results.close()
    finally:
        entries = best_tiles(cases, results.rows, size)
        # Without a GPU, under a name that no device has.
        update_table(table or TABLE, capability or "none", entries, provenance(where))
        left = sum(not measured(row) for row in results.rows.values())
        print(f"{report(cases, entries)}\n{left} rows not measured\nwritten: {results.path}, {table or TABLE}")


def provenance(where: dict[str, Any]) -> dict[str, Any]:
    """Origin of an entry of the table: device, date, commit and version of Triton."""
    return {
        "accelerator": where["hardware"]["accelerator"],
        "date": where["date"],
        "commit": where["commit"],
        "triton": where["versions"]["triton"],
    }


if __name__ == "__main__":
    typer.run(main)
