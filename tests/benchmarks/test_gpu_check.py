"""The check detects wrong kernels, and each timed row uses one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_kit import check, encode
from support.fake_device import fake_devices

from kvcache_compress.bench import decode
from kvcache_compress.bench.layers import Shape
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.triton_kernels.encode import launch as encoding
from kvcache_compress.triton_kernels.update import append as appending

CPU = torch.device("cpu")
TINY = Shape(2, 1, 32)
PLAIN = ("uniform-4bit", "tiny", TINY, 64, CPU)
"""A preset whose steps of static layers are not checked: `test_check_static.py` has those."""
ONE_OF_EACH_METHOD = (
    "turboquant-2.5bit", "kivi-2bit", "polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit", "commvq-1bit",
)  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 1.01, float("nan")])
def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    attend = check.View.attend
    monkeypatch.setattr(check.View, "attend", lambda *arguments: attend(*arguments) * factor)
    found = check.check_kernels(*PLAIN)
    assert (found.error is None) == (factor == 1), found.error
    if found.error is not None:
        assert found.error.startswith("attention differs by")


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_call_is_compared(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Both the first and the repeated launch are compared."""
    attend = check.View.attend
    calls: list[int] = []
    places: set[tuple[int, ...]] = set()

    def attend_once_wrong(keys: check.View, call: AttentionCall, values: check.View, *path: Any) -> torch.Tensor:
        calls.append(len(keys.codec.kernel_side.plans))
        places.add((call.query.data_ptr(), keys.tail.data_ptr(), values.sinks.data_ptr()))
        return attend(keys, call, values, *path) * (1.5 if len(calls) == wrong + 1 else 1)

    monkeypatch.setattr(check.View, "attend", attend_once_wrong)
    found = check.check_kernels("uniform-4bit", "tiny", TINY, 128, CPU)
    assert str(found.error).startswith("attention differs by")
    assert calls == [0, 1], "plans before each call"
    assert len(places) == 2


def test_groups_are_filled_up() -> None:
    for name in ("uniform-4bit", "kivi-4bit"):
        found = check.check_kernels(name, "tiny", TINY, 64 + 21, CPU)
        assert (found.tokens, found.error) == (85, None)


@pytest.mark.parametrize("wrong", ["later", "elsewhere"])
def test_appending_to_a_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    module = appending
    append, shape = module.append, Shape(4, 2, 32)
    assert check._appends(shape, CPU, torch.bfloat16)

    def append_wrongly(keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> None:
        append(keys, values, *rest)
        if wrong == "elsewhere":
            rest[1][0, 0, 0, 0] = 1
        elif rest[2] == 6:
            rest[0][:, :, 6] = 0

    monkeypatch.setattr(module, "append", append_wrongly)
    assert not check._appends(shape, CPU, torch.bfloat16)


FLUSHED = ("kivi-4bit", "tiny", TINY, 64, CPU)


def test_right_flushes_pass() -> None:
    assert check.check_kernels(*FLUSHED).error is None


@pytest.mark.parametrize("wrong", ["codes", "place", "moved", "unseen"])
def test_wrong_flushes_are_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Wrong codes in the second call, or a missed NaN in the third, are detected and reported by `check_kernels`."""
    module, calls = encoding, []
    flush = module.flush

    def flush_wrongly(encoder: Any, x: torch.Tensor, tokens: int, kept: int, fields: Any, at: int, *rest: Any) -> None:
        calls.append(at)
        flush(encoder, x, tokens, kept, fields, at, *rest)
        if wrong == "codes" and len(calls) == 2:
            fields[0][:, :, at:] ^= 1
        if wrong == "place" and len(calls) == 2:
            fields[0][:, :, at - 1] = 1
        if wrong == "moved" and len(calls) == 2:
            rest[0][0, 0, 9, 0] = 1
        if wrong == "unseen":
            rest[1].fill_(1)

    monkeypatch.setattr(module, "flush", flush_wrongly)
    assert "leave a tail" in str(check.check_kernels(*FLUSHED).error)
    assert len(calls) in (3, 6)


def test_wrong_codes_and_appended_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    words, scalars = torch.arange(1000, dtype=torch.int32), torch.linspace(1, 2, 1000).half()
    assert check.differing((words, scalars), (words, scalars)) == 0
    other = words.clone()
    other[3] ^= 16
    next_place = (scalars.view(torch.int16) + 1).view(torch.float16)
    assert check.differing((other, scalars), (words, next_place)) == 1 / 2000
    two_places = (scalars.view(torch.int16) + 2).view(torch.float16)
    assert check.differing((words, scalars), (words, two_places)) == 0.5
    monkeypatch.setattr(check, "differing", lambda *_: 0.5)
    assert check.check_kernels(*PLAIN).error == "5.0e-01 of the stored words differ: allowed 0.001"
    monkeypatch.undo()
    monkeypatch.setattr(check, "_appends", lambda *_: False)
    assert "appended" in str(check.check_kernels(*PLAIN).error)


@pytest.mark.parametrize("name", ["uniform-4bit", *ONE_OF_EACH_METHOD])
def test_rows_mix_no_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows run on a device that refuses tensors of others; with PyTorch's operators, as kernels cannot run there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = Shape(4, 2, 64)
    with fake_devices() as (device, _):
        row = decode.compressed_time(name, "tiny", shape, 2, 64, device, torch.float32, repeats=1)
        assert row.bits is not None
        assert encode.encode_time(name, "tiny", shape, 2, 64, device, 1, torch.float32).milliseconds is not None
        monkeypatch.setattr(check, "_appends", lambda *_: True)
        found = check.check_kernels(name, "tiny", shape, 64, device, torch.float32)
        assert (found.error, found.differing_codes) == (None, 0.0)
