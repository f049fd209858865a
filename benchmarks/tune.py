"""Tune the attention kernel on this GPU: measure its tiles, and write the fastest to the package if they pay off.

    make tune-gpu OUTPUT=DIR                                   # the main presets in Llama's shape, five minutes
    python benchmarks/tune.py --output DIR --all --minutes 60  # all presets and shapes
    python benchmarks/tune.py --output DIR --preset kivi-2bit  # one preset; continues an earlier run of the same code
    python benchmarks/tune.py --output DIR --small             # without a GPU (TRITON_INTERPRET=1)

Every tile that a preset supports is first compiled, in several processes, and compared with plain attention; correct
tiles that spill no registers are then timed in turns with the tile that the package chooses by rule. Tiles most like
the rule's come first, so that a run that ends early has tried the likely ones. The table, by default
`triton_kernels/attention/tiles.json`, gets an entry, with both times, for each kernel that another tile makes more than
3 % faster; `DIR/tiles.json` has the times of all tiles, each row once it is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_kit.jobs import SIZES, SMALL_SIZES, TARGETS, TUNING, Job
from gpu_kit.result_file import ResultFile, hash_sources, measured
from gpu_kit.supervise import Workers, default_processes, measure_stages
from gpu_kit.tune import BATCH, SMALL, TOKENS, Case, best_tiles, plan_cases, plan_tiles, update_table

from kvcache_compress.bench.layers import VARIANTS
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.config import preset_names
from kvcache_compress.eval.provenance.results import circumstances, git_commit
from kvcache_compress.triton_kernels.attention.tiles import capability_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "triton_kernels" / "attention" / "tiles.json"


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
            text = "none that was measured pays, and not all were, or none was right"
        elif entry is None:
            text = f"stays with {tuple(case.rule)}"
        else:
            ratio = max(one["ratio"] for one in entry["measured"])
            text = f"{tuple(entry['tile'].values())} in {ratio:.3f} of the time of {tuple(case.rule)}"
        lines.append(f"{case.cache}, {case.shape}: {text}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; a wrong one ends the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for tiles.json, with all times, and the log")
    parser.add_argument("--table", type=Path, help="table to change; by default the package's, with --small DIR's")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes for the complete run (%(default)s)")
    parser.add_argument("--preset", action="append", help=f"presets to tune ({', '.join(TARGETS)})")
    parser.add_argument("--all", action="store_true", help="all presets, if none is named, in all shapes")
    parser.add_argument("--tiles", type=int, help="most tiles of each kernel; all by default")
    parser.add_argument("--processes", type=int, default=default_processes(), help="that compile at once (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes; runs without a GPU")
    options = parser.parse_args(arguments)
    if not options.small and (not torch.cuda.is_available() or interpreting()):
        parser.error("no GPU here, or TRITON_INTERPRET is set: only --small runs then")
    known = [*TARGETS, *(name for name in [*VARIANTS, *preset_names()] if name not in TARGETS)]
    if unknown := {*(options.preset or ())} - {*known}:
        parser.error(f"--preset {', '.join(sorted(unknown))}: allowed {', '.join(known)}")
    options.preset = options.preset or (known if options.all else list(TARGETS))
    options.table = options.table or (options.output / "table.json" if options.small else TABLE)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure tiles on the device and write the table."""
    options = parse(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    capability = capability_of(device)
    if not options.small and capability is None:
        raise SystemExit("no NVIDIA GPU: there are no tables for others")
    shapes = (SMALL_SIZES if options.small else SIZES).shapes
    shapes = shapes if options.all else dict([next(iter(shapes.items()))])
    cases = plan_cases(options.preset, shapes, options.small, options.tiles, capability)
    size = SMALL if options.small else (BATCH, TOKENS)
    where = circumstances(device) | {"commit": git_commit(__file__), "small": options.small}
    # Without the table that is written here, which would differ when a run is continued.
    where |= {"sources": hash_sources(ROOT, ("*.py", "*.yaml")), "minutes": options.minutes}
    options.output.mkdir(parents=True, exist_ok=True)
    results = ResultFile(options.output / "tiles.json", where, plan_tiles(cases, size), tuple(TUNING))
    if results.differs:
        print(f"new file, the old one is kept next to it: other {results.differs}")

    def keep(job: Job, row: dict[str, Any]) -> None:
        results.keep(job, row)
        if job.part == "tile" or row.get("error") is not None:
            print(line(job, row), flush=True)

    try:
        with (options.output / "tiles-log.txt").open("a", encoding="utf-8") as log:
            workers = Workers(options.small, log=log)
            measure_stages(results, 60 * options.minutes, workers, options.processes, keep, options.output)
        results.close()
    finally:
        entries = best_tiles(cases, results.rows, size)
        # Without a GPU, under a name that no device has.
        update_table(options.table, capability or "none", entries, provenance(where))
        left = sum(not measured(row) for row in results.rows.values())
        print(f"{report(cases, entries)}\n{left} rows not measured\nwritten: {options.output}, {options.table}")


def provenance(where: dict[str, Any]) -> dict[str, Any]:
    """Origin of an entry of the table: device, date, commit and version of Triton."""
    return {
        "accelerator": where["hardware"]["accelerator"],
        "date": where["date"],
        "commit": where["commit"],
        "triton": where["versions"]["triton"],
    }


if __name__ == "__main__":
    main()
