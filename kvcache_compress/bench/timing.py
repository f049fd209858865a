"""Times of functions on a device, as medians, and the bandwidth that a copy reaches there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def median_ms(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 20, warmup: int = 3) -> float:
    """Median milliseconds of a call, by the device's events where it is a GPU.

    The calls are equal but for their inputs, and take turns, so that a cache does not help the next one.
    """
    for at in range(warmup):
        calls[at % len(calls)]()
    times = []
    for at in range(repeats):
        call = calls[at % len(calls)]
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    """GB/s of a copy within the device's memory, of `size` bytes read and as many written."""
    if device.type != "cuda":
        size = min(size, 256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms([lambda: target.copy_(source)], device, repeats=10) / 1e6
