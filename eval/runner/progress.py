"""Progress of a measurement on stderr, with the remaining time."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

Progress = Callable[[int, int, str], None]
"""Called with runs done, runs in all, and the next one's label."""
LOG_EVERY_S = 10.0


class ProgressLine:
    """Progress as one updating line on a terminal, or in logs as a line every `LOG_EVERY_S` seconds.

    The remaining time assumes this run's mean speed so far. The work of earlier runs does not count.
    """

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.shown = -LOG_EVERY_S

    def __call__(self, done: int, total: int, label: str) -> None:
        now = time.monotonic()
        if done == 0:
            self.started = now
        finished = done == total
        terminal = sys.stderr.isatty()
        if not terminal and not finished and now - self.shown < LOG_EVERY_S:
            return
        self.shown = now
        seconds = (now - self.started) / done * (total - done) if done else None
        left = "" if seconds is None or finished else f", {timedelta(seconds=round(seconds))} left"
        line = f"[{done}/{total}] {label}{left}"
        sys.stderr.write(f"\r\033[K{line}" + "\n" * finished if terminal else f"{line}\n")
        sys.stderr.flush()
