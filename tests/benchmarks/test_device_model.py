"""The model of a GPU that predicts kernels from their machine code: what bounds a kernel, by hand-made figures."""

from __future__ import annotations

from typing import Any

import device_model
import pytest
from device_model import H200, predict


def row(clocks: int = 100, registers: int = 255, shared: int = 0, **pipes: int) -> dict[str, Any]:
    counts = dict.fromkeys((*device_model.CLOCKS, "other"), 0) | pipes
    loop = {"tokens": 32, "warps": 1, "stages": 2, "clocks": clocks, "pipes": counts}
    return {"registers": registers, "shared_bytes": shared, "loop": loop}


def test_bytes_bound_a_kernel_of_few_instructions() -> None:
    prediction = predict(row(alu=10), 4.8e9, tokens=131072, heads=8, batch=8)
    assert prediction.bound == "bytes"
    assert (prediction.microseconds, prediction.share) == (pytest.approx(1000), 1)


def test_a_pipe_bounds_by_its_rate() -> None:
    """A full device: 8 x 8 x 131072 / 32 turns over 132 processors of four schedulers, two clocks each."""
    prediction = predict(row(alu=500, fma=100), 1, tokens=131072, heads=8, batch=8)
    turns = 8 * 8 * 131072 / 32 / 132 / 4
    assert prediction.bound == "alu"
    assert prediction.microseconds == pytest.approx(turns * 1000 / 1750, rel=0.05)
    assert prediction.parts["issue"] == pytest.approx(prediction.microseconds * 0.6)


def test_few_warps_do_not_hide_latency() -> None:
    slow = predict(row(clocks=4000, alu=10), 1, tokens=131072, heads=8, batch=512)
    assert slow.bound == "latency"
    hidden = predict(row(clocks=4000, registers=64, alu=10), 1, tokens=131072, heads=8, batch=512)
    assert hidden.parts["latency"] == pytest.approx(slow.parts["latency"] / 4, rel=0.05)


@pytest.mark.parametrize(
    ("figures", "warps", "expected"),
    [
        (row(registers=255), 1, 8),
        (row(registers=168), 1, 12),
        (row(registers=32), 1, 32),
        (row(registers=32), 4, 64),
        (row(registers=255, shared=100 * 1024), 1, 2),
    ],
)
def test_resident_warps(figures: dict[str, Any], warps: int, expected: int) -> None:
    assert device_model.resident_warps(figures, warps, H200) == expected


def test_a_short_cache_leaves_processors_idle() -> None:
    """8 heads of 512 tokens are 32 programs of four turns: each runs alone."""
    prediction = predict(row(clocks=1000, alu=10), 1, tokens=512, heads=8)
    assert prediction.bound == "latency"
    assert prediction.microseconds == pytest.approx(4 * 1000 / 1750)
