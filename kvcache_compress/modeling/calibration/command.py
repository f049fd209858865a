"""Frame of `kvcache-compress calibrate`: checks, the model, progress, and a summary of time and memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvcache_compress.files.atomic import is_replaceable
from kvcache_compress.files.lock import only_one
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.validation import usable_device

from .text import check_sources

_QUIET_SECONDS = 30.0
"""Interval between lines of progress if the output is not a terminal."""
Report: TypeAlias = Callable[[str, int, int], None]
"""Callback for progress: name of the work, steps done, steps in all."""


class Calibration(NamedTuple):
    """A loaded model, its tokenizer, and a callback for progress."""

    model: Any
    tokenizer: Any
    report: Report


@contextmanager
def calibration(
    console: Console, model: str, text: Sequence[str], output: Path, device: str | None
) -> Iterator[Calibration]:
    """Load a model to calibrate, show progress within the block, and print time, size and memory after it.

    Raises:
        ValueError: The device does not exist, the output is impossible or texts are missing; these are reported before
            the model is loaded.
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
        yield Calibration(loaded, tokenizer, _Reporter(console, progress))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    minutes = (time.perf_counter() - started) / 60
    size = output.stat().st_size / 2**20
    console.print(
        f"{output}: {size:.1f} MiB in {minutes:.1f} minutes, peak memory {peak / 2**30:.2f} GiB", soft_wrap=True
    )


def check_output(output: Path) -> None:
    """Raise `ValueError` if a file of tensors cannot be written here."""
    if output.suffix != ".safetensors":
        raise ValueError(f"output={str(output)!r}: allowed are files that end in .safetensors")
    if output.is_dir():
        raise ValueError(f"output={str(output)!r}: allowed is a file, this is a folder")
    if not is_replaceable(output):
        raise ValueError(f"output={str(output)!r}: allowed is a file that can be replaced, this is a device or a pipe")
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"output={str(output)!r}: allowed in writable folders; {str(folder)!r} is not one")


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
