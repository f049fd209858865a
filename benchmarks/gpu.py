"""Check the kernels on a GPU and measure them, the rows that are worth most first, within the minutes that are given.

    make bench-gpu OUTPUT=DIR                       # results, tables and logs in DIR
    python benchmarks/gpu.py --output DIR           # the same, where the package is installed; continues what is there
    python benchmarks/gpu.py --output DIR --plan    # only the time plan, and the predicted time of each row
    python benchmarks/gpu.py --output DIR --small   # all parts, tiny, also without a GPU (TRITON_INTERPRET=1)
    python benchmarks/gpu.py --output DIR --table   # only the tables of what is there

It needs torch, Triton and Transformers alone. Each preset's kernels are compared with PyTorch's operators; a preset
that fails is timed all the same, and its rows are marked invalid. Rows are measured by a process that is restarted if
it dies (`gpu_kit/worker.py`); each row is in the file as soon as it is measured. `gpu_kit/jobs.py` has the order.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_kit.gpu_table import line, plan_text, tables
from gpu_kit.jobs import KEYS, SIZES, SMALL_SIZES, TUNED, TUNED_TILES, Job, plan_jobs
from gpu_kit.result_file import ResultFile, hash_sources
from gpu_kit.supervise import Workers, default_processes, measure_stages
from gpu_kit.tiles import tiles_to_time

from kvcache_compress.bench.layers import VARIANTS
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.config import preset_names
from kvcache_compress.eval.provenance.results import circumstances, git_commit

ROOT = Path(__file__).resolve().parents[1]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; a wrong one ends the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.json, tables.txt and logs")
    parser.add_argument("--minutes", type=float, default=9.5, help="minutes for the complete run (%(default)s)")
    parser.add_argument("--preset", action="append", help="presets to measure; all by default")
    parser.add_argument("--part", action="append", choices=[*KEYS], help="parts; all by default")
    parser.add_argument("--tiles", type=int, default=TUNED_TILES, help="tiles to time of each preset (%(default)s)")
    parser.add_argument("--processes", type=int, default=default_processes(), help="that compile at once (%(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny sizes; runs without a GPU")
    parser.add_argument("--plan", action="store_true", help="only print the time plan and the predictions")
    parser.add_argument("--table", action="store_true", help="only print what the folder's file holds")
    options = parser.parse_args(arguments)
    if not (options.small or options.plan or options.table) and (not torch.cuda.is_available() or interpreting()):
        parser.error("no GPU here, or TRITON_INTERPRET is set: only --small, --plan and --table run then")
    known = [*VARIANTS, *preset_names()]
    if unknown := {*(options.preset or ())} - {*known}:
        parser.error(f"--preset {', '.join(sorted(unknown))}: allowed {', '.join(known)}")
    options.tuned = options.preset or TUNED
    options.preset = options.preset or (list(TUNED) if options.small else known)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the kernels on the device and measure them."""
    options = parse(arguments)
    path = options.output / "gpu.json"
    if options.table:
        print(tables(json.loads(path.read_text(encoding="utf-8"))))
        return
    sizes = SMALL_SIZES if options.small else SIZES
    main_shape = next(iter(sizes.shapes.values()))
    tiles = {name: tiles_to_time(name, main_shape, options.tiles) for name in options.tuned}
    jobs = plan_jobs(options.preset, options.part or KEYS, sizes, tiles)
    if options.plan:
        print(plan_text(jobs, options.processes))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    where = circumstances(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"), "flash-attn", "flashinfer-python"
    )
    where |= {"commit": git_commit(__file__), "sources": hash_sources(ROOT)}
    results = ResultFile(path, where | {"small": options.small, "minutes": options.minutes}, jobs)
    with (options.output / "log.txt").open("a", encoding="utf-8") as log:

        def say(text: str) -> None:
            print(text, flush=True)
            print(text, file=log, flush=True)

        def keep(job: Job, row: dict[str, Any]) -> None:
            results.keep(job, row)
            say(line(job.part, row))

        say(json.dumps({name: where[name] for name in ("command", "date", "commit", "versions", "hardware")}))
        if results.differs:
            say(f"new file, the old one is kept next to it: other {results.differs}")
        try:
            workers = Workers(options.small, log=log)
            measure_stages(results, 60 * options.minutes, workers, options.processes, keep, options.output)
            results.close()
        finally:
            text = tables(results.contents())
            (options.output / "tables.txt").write_text(text + "\n", encoding="utf-8")
            print(f"{text}\nwritten: {options.output}")


if __name__ == "__main__":
    main()
