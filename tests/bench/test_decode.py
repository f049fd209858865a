"""Times of decode attention: rows of failures, caches of random codes, and one device per row."""

import pytest
import torch

from kvcache_compress.bench import decode
from kvcache_compress.bench.layers import Shape
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.config import preset_names

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 64)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_filled_at_random(preset: str) -> None:
    for view in decode.random_view(preset, SHAPE, 2, 256, CPU, torch.bfloat16)[:2]:
        assert view.packed == 256
        assert view.dense().isfinite().all()


def test_a_failure_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 80 GiB")

    monkeypatch.setattr(decode, "full_time", too_large)
    full, ours, unknown = decode.measure_decode(["kivi-4bit", "kivi-9bit"], "tiny", SHAPE, [1], [64], CPU, 1)
    assert (full.milliseconds, full.error) == (None, "out of memory: Tried to allocate 80 GiB")
    assert (ours.cache, ours.speedup, ours.bound, ours.error) == ("kivi-4bit", None, None, None)
    assert "kivi-9bit" in str(unknown.error)


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0
