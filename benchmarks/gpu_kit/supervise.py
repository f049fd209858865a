"""Supervise worker processes that measure: keep each row as it is printed, and replace workers that die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .jobs import ENDED, NOT_MEASURED, SILENT, Job

WORKER = (sys.executable, "-P", "-m", "gpu_kit.worker")
ROW_SECONDS = 150.0
"""Longest silence of a worker; no row takes that long, so a worker that is silent for longer hangs."""
KIT_PATH = (str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
"""Import path of a worker, with the folder of the kit, which is not installed."""
SPARE = 0.03
"""Share of the time at its end in which no row is begun, so that the last one can finish."""
THREADS = "2"
"""PyTorch's threads in a worker: several workers share the processor, which only builds codecs."""
END_SECONDS = 10.0
"""Longest wait for a killed worker: a device that hangs may not release its process."""
Keep = Callable[[Job, dict[str, Any]], None]


def measure_all(
    jobs: Sequence[Job],
    seconds: float,
    small: bool,
    keep: Keep,
    command: Sequence[str] = WORKER,
    row_seconds: float = ROW_SECONDS,
) -> None:
    """Call `keep` with a row for every job that was begun within `seconds`, even if workers die.

    Parts before the last one begun have used their share of time: a new worker does their remaining jobs at the end.

    Raises:
        RuntimeError: a worker ended before it began a job.
    """
    end = time.monotonic() + seconds
    left = list(jobs)
    parts = list(dict.fromkeys(job.part for job in jobs))
    reached = 0
    while left and (remaining := end - time.monotonic()) > 0:
        environment = os.environ | {"OMP_NUM_THREADS": THREADS, "PYTHONPATH": os.pathsep.join(KIT_PATH)}
        worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        late = [job for job in left if job.part in parts[:reached]]
        task = {"jobs": [job for job in left if job not in late], "late": late, "small": small}
        current: Job | None = None
        begun = False
        try:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError), worker.stdin:
                json.dump(task | {"seconds": remaining * (1 - SPARE)}, worker.stdin)
            for event in _events(worker, end, row_seconds):
                if "begin" in event:
                    current, begun = _job(event["begin"]), True
                    place = parts.index(current.part)
                    reached = place if place >= reached else len(parts)  # back at one: all had their share
                elif current is not None:
                    keep(current, event["row"])
                    left.remove(current)
                    current = None
        except queue.Empty:
            if current is not None:
                over = time.monotonic() >= end
                why = f"{NOT_MEASURED} time" if over else f"{SILENT} {row_seconds:g} s"
                keep(current, current.named | {"error": why})
                left.remove(current)
                current = None
            elif not begun and time.monotonic() < end:
                raise RuntimeError(f"the measuring process was silent for {row_seconds:g} s") from None
        finally:
            worker.kill()
            code = _wait(worker)
        if current is not None:
            keep(current, current.named | {"error": f"{ENDED} {_ending(code)}"})
            left.remove(current)
        elif code == 0:
            return
        elif not begun:
            raise RuntimeError(f"the measuring process ended before its first row: {_ending(code)}")


def measure_in_parallel(jobs: Sequence[Job], processes: int, seconds: float, small: bool, keep: Keep) -> None:
    """Run `measure_all` in several processes at once, for rows that are not timed.

    If a process does not start, its rows stay as they are, and the others continue.
    """

    def measure(part: Sequence[Job]) -> None:
        try:
            measure_all(part, seconds, small, keep)
        except (RuntimeError, OSError) as error:
            print(f"a checking process did not start: {error}", flush=True)

    processes = min(processes, os.cpu_count() or 1, len(jobs))
    if jobs:
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(measure, [jobs[first::processes] for first in range(processes)]))


def _job(values: Any) -> Job:
    part, rest = values
    return Job(part, tuple(rest))


def _wait(worker: subprocess.Popen[str]) -> int | None:
    try:
        return worker.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _ending(code: int | None) -> str:
    if code is None:
        return "killed, but still there"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _events(worker: subprocess.Popen[str], end: float, row_seconds: float) -> Iterator[dict[str, Any]]:
    """Events that a worker prints until it ends; raises `queue.Empty` if it is silent for too long, or at `end`."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get(timeout=max(0.001, min(row_seconds, end - time.monotonic())))) is not None:
        if line.endswith("\n"):  # otherwise it died while printing
            yield json.loads(line)
    _wait(worker)
