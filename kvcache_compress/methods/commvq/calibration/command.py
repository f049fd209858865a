"""`kvcache-compress calibrate`: progress and a summary around `calibrate_commvq`."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvcache_compress.files.lock import only_one
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.validation.arguments import usable_device

from .calibrate import CommVQSettings, calibrate_commvq, check_output
from .text import check_sources

_QUIET_SECONDS = 30.0
"""Interval between lines of progress if the output is not a terminal."""


def run_calibration(
    console: Console, model: str, text: Sequence[str], output: Path, settings: CommVQSettings, device: str | None
) -> None:
    """Calibrate CommVQ and print progress, losses, time and memory.

    Raises:
        ValueError: as `calibrate_commvq`, or the device does not exist; this, an impossible output and missing texts
            are reported before the model is loaded.
        OSError: a file cannot be written.
    """
    started = time.perf_counter()
    check_output(output)
    check_sources(text)
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loaded, tokenizer = load_model(model, dtype=torch.float32 if place.type == "cpu" else torch.bfloat16, device=place)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
    progress = Progress(*columns, *times, console=console, disable=not console.is_terminal)
    with only_one(output.with_name(f".{output.name}.lock")), progress:
        losses = calibrate_commvq(
            loaded, tokenizer, text, output, settings, report=_Reporter(console, progress), notice=console.print
        )
    console.print(_loss_table(losses))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    minutes = (time.perf_counter() - started) / 60
    size = output.stat().st_size / 2**20
    console.print(
        f"{output}: {size:.1f} MiB in {minutes:.1f} minutes, peak memory {peak / 2**30:.2f} GiB", soft_wrap=True
    )


class _Reporter:
    """Progress report: a bar per kind of work on a terminal, else a line now and then."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._shown = 0.0

    def __call__(self, doing: str, done: int, total: int) -> None:
        now = time.monotonic()
        if doing not in self._tasks:
            self._tasks[doing] = self._progress.add_task(doing, total=total)
            self._started[doing] = now
        self._progress.update(self._tasks[doing], completed=done)
        if self._console.is_terminal or not done or (now - self._shown < _QUIET_SECONDS and done < total):
            return
        self._shown = now
        left = (now - self._started[doing]) / done * (total - done)
        self._console.print(f"{doing}: {done} of {total}, {left:.0f} s left")


def _loss_table(losses: dict[str, Any]) -> Table:
    """Table of mean squared errors of normalized vectors, on windows trained on and on held-out ones."""
    table = Table(title="mean squared error of normalized vectors, over layers and heads")
    for heading in ("side", "rounds", "windows", "least", "mean", "most"):
        table.add_column(heading, justify="left" if heading in ("side", "windows") else "right")
    for side in ("keys", "values"):
        parts = [layer[side] for layer in losses.values()]
        name = "encoder" if "encoder" in parts[0] else "rounds"
        rounds = "encoder" if name == "encoder" else str(len(parts[0]["rounds"][0]))
        for windows, kind in (("trained on", name), ("held out", "held_out")):
            by_layer = [part[kind] for part in parts]
            ends = by_layer if name == "encoder" else [head[-1] for heads in by_layer for head in heads]
            table.add_row(side, rounds, windows, *(f"{x:.4f}" for x in (min(ends), statistics.fmean(ends), max(ends))))
    return table
