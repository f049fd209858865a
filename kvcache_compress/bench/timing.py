"""Time functions on a device, as medians, and measure the bandwidth of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 1 << 30
"""Bytes read before each call, many times a GPU's L2 cache. At 4 TB/s this takes a quarter of a millisecond, during
which Python queues the call, so that Python's time is not measured unless it is longer."""
LONGEST_NAME = 80
"""Characters of a kernel's name that are kept."""


def median_ms(
    call: Callable[[], Any], device: torch.device, repeats: int = 20, warmup: int = 3, flushes: int = 1
) -> float:
    """Median milliseconds of a call; on a GPU by its events, and with an L2 cache full of other, unchanged data.

    `warmup`: calls before them, but no more than `repeats`.
    `flushes`: number of times that `FLUSH_BYTES` are read before a call, more for calls that keep Python longer.
    """
    for _ in range(min(warmup, repeats)):
        call()
    times = []
    other = _other_data(device)
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


def kernel_ms(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each kernel that a call launches, by name, medians by PyTorch's profiler; empty without a GPU.

    Raises:
        RuntimeError: the profiler does not work here.
    """
    if device.type != "cuda":
        return {}
    other = _other_data(device)
    call()
    seen: list[dict[str, list[float]]] = []
    for profiled in (lambda: None, call):
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(repeats):
                other.sum()
                profiled()
            torch.cuda.synchronize(device)
        found: dict[str, list[float]] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                found.setdefault(event.name[:LONGEST_NAME], []).append(event.time_range.elapsed_us() / 1000)
        seen.append(found)
    flushes, found = seen
    return {
        name: statistics.median(times) * len(times) / repeats for name, times in found.items() if name not in flushes
    }


def _other_data(device: torch.device) -> torch.Tensor:
    return torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, device=device)


def copy_bandwidth(device: torch.device, size: int = 4 << 30) -> float:
    """GB/s, read and written, of a copy of at most `size` bytes within the device's memory."""
    size = min(size, torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 256 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, repeats=10) / 1e6
