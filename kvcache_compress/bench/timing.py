"""Times of functions on a device, as medians, and the bandwidth that a copy reaches there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 1 << 30
"""Written before each call: many times a GPU's L2; at 4 TB/s it takes a quarter of a millisecond, in which the call is
queued, so that Python's time is not in the measurement unless it is longer."""


@dataclass(frozen=True)
class CopyBandwidth:
    """GB/s of a copy within the device's memory, bytes read and written together."""

    gigabytes_per_second: float | None = None
    error: str | None = None


def median_ms(
    call: Callable[[], Any], device: torch.device, repeats: int = 20, warmup: int = 3, flushes: int = 1
) -> float:
    """Median milliseconds of a call, by the device's events where it is a GPU, whose L2 then holds nothing of use.

    `flushes`: how often `FLUSH_BYTES` are written before a call, more for one that keeps Python longer.
    """
    for _ in range(warmup):
        call()
    times = []
    flushed = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(flushes):
                flushed.zero_()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, size: int = 4 << 30) -> float:
    """GB/s of a copy within the device's memory, of `size` bytes at most read and as many written."""
    size = min(size, torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, repeats=10) / 1e6
