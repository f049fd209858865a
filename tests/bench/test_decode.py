"""Times of decode attention: rows of failures, caches of random codes, and one device per row."""

from __future__ import annotations

import pytest
import torch
from support.kernels.fake_device import fake_devices

from kvcache_compress.bench import decode
from kvcache_compress.bench.layers import Shape
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.config import preset_names

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 64)
ONE_OF_EACH_METHOD = (
    "uniform-4bit", "turboquant-2.5bit", "kivi-2bit", "polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit",
    "commvq-1bit",
)  # fmt: skip


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_filled_at_random(preset: str) -> None:
    for view in decode.random_view(preset, SHAPE, 2, 256, CPU, torch.bfloat16)[:2]:
        assert view.packed == 256
        assert view.dense().isfinite().all()


def test_a_failure_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 80 GiB")

    monkeypatch.setattr(decode, "full_time", too_large)
    full, ours, unknown = decode.measure_decode(["kivi-4bit", "kivi-9bit"], {"tiny": SHAPE}, [1], [64], CPU, 1)
    assert (full.milliseconds, full.error) == (None, "out of memory: Tried to allocate 80 GiB")
    assert (ours.cache, ours.speedup, ours.bound, ours.error) == ("kivi-4bit", None, None, None)
    assert "kivi-9bit" in str(unknown.error)


@pytest.mark.parametrize("name", ONE_OF_EACH_METHOD)
def test_rows_mix_no_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row runs on a device that refuses tensors of others; with PyTorch's operators, as kernels cannot run there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with fake_devices() as (device, _):
        assert decode.compressed_time(name, "tiny", SHAPE, 2, 64, device, torch.float32, repeats=1).bits is not None


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0
