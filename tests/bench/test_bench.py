"""Attention is compared before it is timed, and wrong attention refused."""

from typing import Any

import pytest
import torch

from kvcache_compress.bench import compare, decode
from kvcache_compress.bench.layers import Shape
from kvcache_compress.bench.timing import copy_bandwidth, median_ms
from kvcache_compress.config import preset_names
from kvcache_compress.storage.shared.rope_track import _warn_once
from kvcache_compress.storage.view import View

CPU = torch.device("cpu")
TINY = Shape(4, 2, 64)
NAN = float("nan")


@pytest.fixture(autouse=True)
def _same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU kernels, and a seed: the 16-bit error of so few numbers varies by a tenth and comes close to the bound."""
    torch.manual_seed(0)
    monkeypatch.setattr(decode, "interpreting", lambda: False)


def test_the_last_row_is_compared_and_another_one() -> None:
    query, keys, values = torch.randn(3, 4, 64), torch.randn(3, 2, 40, 64), torch.randn(3, 2, 40, 64)
    right = compare.plain_attention(query, keys, values)
    seen = []

    def read(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(rows))
        return keys[rows], values[rows]

    for _ in range(40):
        assert compare.compare(lambda: right, query, read, 2e-3) == 0
    assert {*seen} == {(0, 2), (1, 2), (2,)}


@pytest.mark.parametrize("wrong", [1, 2])
def test_both_calls_are_compared(wrong: int) -> None:
    query, keys = torch.randn(1, 4, 64), torch.randn(1, 2, 40, 64)
    right, calls = compare.plain_attention(query, keys, keys), iter((1, 2))
    spoiled = lambda: right * (1.01 if next(calls) == wrong else 1)  # noqa: E731
    with pytest.raises(ValueError, match=r"attention differs by 1\.0e-02 of its size, more than 2\.0e-03"):
        compare.compare(spoiled, query, lambda _: (keys, keys), 2e-3)


@pytest.mark.parametrize(("row", "factor"), [(2, 1.01), (0, NAN)])
def test_wrong_attention_is_refused(monkeypatch: pytest.MonkeyPatch, row: int, factor: float) -> None:
    """Wrong or infinite results are detected, the latter in any row, even if it is not compared."""
    attend = View.attend

    def attend_wrongly(*arguments: Any) -> torch.Tensor:
        out = attend(*arguments)
        out[row] *= factor
        return out

    monkeypatch.setattr(View, "attend", attend_wrongly)
    with pytest.raises(ValueError, match="attention differs by"):
        decode.compressed_time("kivi-2bit", TINY, 3, 64, CPU, torch.float32, 1)


@pytest.mark.parametrize("name", ["polarquant-rope-4bit", "commvq-2bit", "none"])
def test_right_attention_is_timed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()
    found = decode.compressed_time(name, TINY, 3, 64, CPU, torch.float32, 1)
    assert 0 < found["attention_error"] < 1e-5
    assert found["milliseconds"]
    assert "left-padded" not in caplog.text


def test_libraries_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest library that is right counts; what is wrong or fails is named."""
    found = decode.full_time(TINY, 2, 64, CPU, torch.bfloat16, 1)
    assert found["milliseconds"] == min(time for time in found["libraries"].values() if isinstance(time, float))
    assert set(found["libraries"]) == {"flash", "cudnn"}
    assert isinstance(found["libraries"]["cudnn"], str)
    monkeypatch.setattr(decode, "scaled_dot_product_attention", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(ValueError, match=r"flash: attention differs by 1\.0e\+00 of its size, more than 1\.0e-02"):
        decode.full_time(TINY, 2, 64, CPU, torch.bfloat16, 1)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_filled_at_random(preset: str) -> None:
    for view in decode.random_view(preset, TINY, 2, 256, CPU, torch.bfloat16)[:2]:
        assert view.packed == 256
        assert view.dense().isfinite().all()


def test_median_of_the_repeats_alone() -> None:
    called: list[int] = []
    assert median_ms(lambda: called.append(0), CPU, repeats=4, warmup=2) >= 0
    assert len(called) == 6
    assert copy_bandwidth(CPU, 1 << 20) > 0
