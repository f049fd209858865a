"""Time functions on a device, as medians, and measure the bandwidth of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 1 << 30
"""Bytes written before each call, many times a GPU's L2 cache. At 4 TB/s this takes a quarter of a millisecond, during
which Python queues the call, so that Python's time is not measured unless it is longer."""


@dataclass(frozen=True)
class CopyBandwidth:
    """Bandwidth of a copy within the device's memory, bytes read and written together."""

    gigabytes_per_second: float | None = None
    error: str | None = None


def median_ms(
    call: Callable[[], Any], device: torch.device, repeats: int = 20, warmup: int = 3, flushes: int = 1
) -> float:
    """Median milliseconds of a call; on a GPU by its events, and with a flushed L2 cache.

    `flushes`: number of times that `FLUSH_BYTES` are written before a call, more for calls that keep Python longer.
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
    """GB/s, read and written, of a copy of at most `size` bytes within the device's memory."""
    size = min(size, torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, repeats=10) / 1e6
