"""Time functions on a device, as medians, and measure the bandwidth of a copy."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 1 << 30
"""Bytes read before each call, many times a GPU's L2 cache. At 4 TB/s this takes a quarter of a millisecond, during
which Python queues the call, so that Python's time is not measured unless it is longer."""


def median_ms(
    call: Callable[[], Any], device: torch.device, repeats: int = 20, warmup: int = 3, flushes: int = 1
) -> float:
    """Median milliseconds of a call. On a GPU by its events, and with an L2 cache full of other, unchanged data.

    At most `warmup` calls go before the timed ones. `FLUSH_BYTES` are read `flushes` times before each, more often for
    calls that keep Python busy longer.
    """
    for _ in range(min(warmup, repeats)):
        call()
    times = []
    other = torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, device=device)
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(flushes):
                other.sum()  # written data would still be on its way to memory during the call
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
