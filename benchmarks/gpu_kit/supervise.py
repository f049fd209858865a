"""Supervise worker processes that measure: keep each row as it is printed, and replace workers that die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from . import tools
from .jobs import ENDED, NOT_MEASURED, SILENT, Job, blocked
from .result_file import ResultFile

WORKER = (sys.executable, "-P", "-m", "gpu_kit.worker")
KIT_PATH = (str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
"""Import path of a worker, with the folder of the kit, which is not installed."""
SPARE = 0.03
"""Share of the time at its end in which no row is begun, so that the last one can finish."""
THREADS = "2"
"""PyTorch's threads in a worker: several workers share the processor, which only builds codecs."""
END_SECONDS = 10.0
"""Longest wait for a killed worker: a device that hangs may not release its process."""
CAPS = {"memory": 0.25, "check": 0.35, "profile": 0.25}
"""Largest share of the whole time for one stage of these parts."""
Keep = Callable[[Job, dict[str, Any]], None]


@dataclass(frozen=True)
class Workers:
    """Command, environment and time limit with which workers are started.

    command: the worker, after a tool that runs it, if any.
    row_seconds: longest silence; no row takes that long, so a worker that is silent for longer hangs.
    log: file for what workers print beside their rows; None for this process's standard error.
    """

    small: bool
    command: Sequence[str] = WORKER
    environment: Mapping[str, str] = field(default_factory=dict)
    row_seconds: float = 150.0
    log: TextIO | None = None

    def start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": THREADS, "PYTHONPATH": os.pathsep.join(KIT_PATH)}
        return subprocess.Popen(
            self.command, env=environment | dict(self.environment), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip


def default_processes() -> int:
    """Processes that compile at once: two processors are left to the rest of the machine."""
    return max(1, min(14, (os.cpu_count() or 1) - 2))


def measure_stages(
    results: ResultFile, seconds: float, workers: Workers, processes: int, keep: Keep, folder: Path
) -> None:
    """Measure all planned rows in order: rows that are not timed in several processes, the others one after another.

    Rows of one kind that follow each other are a stage. What a stage does not need is left to those after it.
    """
    end = time.monotonic() + seconds
    for kind, group in groupby(results.jobs, key=lambda job: job.part if job.part in CAPS else "timed"):
        jobs, left = list(group), min(end - time.monotonic(), CAPS.get(kind, 1.0) * seconds)
        ready = []
        for job in jobs:
            if (problem := blocked(job, results.rows)) is None:
                ready.append(job)
            else:
                keep(job, job.named | {"error": problem})
        try:
            if kind == "timed":
                measure_all(ready, left, workers, keep)
            elif kind in tools.TOOLS:
                _measure_under(tools.find_tool(kind), ready, processes, left, workers, keep, folder)
            else:
                measure_in_parallel(ready, processes, left, workers, keep)
        except tools.MissingToolError as missing:
            for job in ready:
                keep(job, job.named | {"error": f"{NOT_MEASURED} {missing}"})


def measure_all(jobs: Sequence[Job], seconds: float, workers: Workers, keep: Keep) -> None:
    """Call `keep` with a row for every job that was begun within `seconds`, even if workers die.

    Raises:
        RuntimeError: a worker ended before it began a job.
    """
    end = time.monotonic() + seconds
    left = list(jobs)
    while left and (remaining := end - time.monotonic()) > 0:
        worker = workers.start()
        current: Job | None = None
        begun = False
        try:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError), worker.stdin:
                task = {"jobs": left, "small": workers.small, "seconds": remaining * (1 - SPARE)}
                json.dump(task, worker.stdin)
            for event in _events(worker, end, workers.row_seconds):
                if "begin" in event:
                    current, begun = _job(event["begin"]), True
                elif current is not None:
                    keep(current, event["row"])
                    left.remove(current)
                    current = None
        except queue.Empty:
            over = time.monotonic() >= end
            if current is not None:
                why = f"{NOT_MEASURED} time" if over else f"{SILENT} {workers.row_seconds:g} s"
                keep(current, current.named | {"error": why})
                left.remove(current)
                current = None
            elif not begun and not over:
                raise RuntimeError(f"the measuring process was silent for {workers.row_seconds:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # with the process that a tool runs
            code = _wait(worker)
        if current is not None:
            keep(current, current.named | {"error": f"{ENDED} {_ending(code)}"})
            left.remove(current)
        elif code == 0:
            return
        elif not begun:
            raise RuntimeError(f"the measuring process ended before its first row: {_ending(code)}")


def measure_in_parallel(jobs: Sequence[Job], processes: int, seconds: float, workers: Workers, keep: Keep) -> None:
    """Run `measure_all` in several processes at once, for rows that are not timed.

    If a process does not start, its rows stay as they are, and the others continue.
    """

    def measure(part: Sequence[Job]) -> None:
        try:
            measure_all(part, seconds, workers, keep)
        except (RuntimeError, OSError) as error:
            print(f"a checking process did not start: {error}", flush=True)

    if jobs:
        processes = min(processes, len(jobs))
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(measure, [jobs[first::processes] for first in range(processes)]))


def _measure_under(
    tool: tools.Tool,
    jobs: Sequence[Job],
    processes: int,
    seconds: float,
    workers: Workers,
    keep: Keep,
    folder: Path,
) -> None:
    """Run each job in a process of its own under a tool, whose logs become one file in `folder`."""
    end = time.monotonic() + seconds
    lock = threading.Lock()

    def measure(numbered: tuple[int, Job]) -> None:
        number, job = numbered
        log = folder / f"{job.part}-{number}.log"
        rows: list[dict[str, Any]] = []
        command = [word.format(log=log) for word in tool.command]
        under = replace(workers, command=(*command, *workers.command), environment=tool.environment)
        try:
            measure_all([job], end - time.monotonic(), under, lambda _, row: rows.append(row))
        except (RuntimeError, OSError) as error:
            rows.append(job.named | {"error": f"{NOT_MEASURED} {error}"})
        text = log.read_text(errors="replace") if log.is_file() else ""
        log.unlink(missing_ok=True)
        with lock, (folder / f"{job.part}.txt").open("a") as kept:
            kept.write(f"{job}\n{text}\n")
        for row in rows:
            keep(job, row | (tools.read_log(job.part, text) if row.get("error") is None else {}))

    with ThreadPoolExecutor(processes if tool.parallel else 1) as pool:
        list(pool.map(measure, enumerate(jobs)))


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
