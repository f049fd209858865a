"""The kit's check of kernels finds wrong ones, and what it times lies on one device."""

from __future__ import annotations

import pytest
import torch
from fake_device import fake_devices

from kvcache_compress.bench import check, decode, encode
from kvcache_compress.bench.layers import Shape

CPU = torch.device("cpu")
ONE_OF_EACH_METHOD = (
    "turboquant-2.5bit", "kivi-2bit", "polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit", "commvq-1bit",
)  # fmt: skip


@pytest.mark.parametrize("factor", [1.0, 1.01, float("nan")])
def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    attend = check.PackedKV.attend
    monkeypatch.setattr(check.PackedKV, "attend", lambda *arguments: attend(*arguments) * factor)
    found = check.check_kernels("turboquant-2bit", "tiny", Shape(4, 2, 64), 64, CPU)
    assert (found.error is None) == (factor == 1)
    if found.error is not None:
        assert found.error.startswith("attention differs by")


def test_wrong_codes_and_appended_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    words, scalars = torch.arange(1000, dtype=torch.int32), torch.linspace(1, 2, 1000).half()
    assert check.differing((words, scalars), (words, scalars)) == 0
    other = words.clone()
    other[3] ^= 16
    next_place = (scalars.view(torch.int16) + 1).view(torch.float16)
    assert check.differing((other, scalars), (words, next_place)) == 1 / 2000
    two_places = (scalars.view(torch.int16) + 2).view(torch.float16)
    assert check.differing((words, scalars), (words, two_places)) == 0.5
    call = ("turboquant-2bit", "tiny", Shape(4, 2, 64), 64, CPU)
    monkeypatch.setattr(check, "differing", lambda *_: 0.5)
    assert check.check_kernels(*call).error == "5.0e-01 of the stored words differ: allowed 0.001"
    monkeypatch.undo()
    monkeypatch.setattr(check, "_appends", lambda *_: False)
    assert "appended" in str(check.check_kernels(*call).error)


@pytest.mark.parametrize("name", ["uniform-4bit", *ONE_OF_EACH_METHOD])
def test_rows_mix_no_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that refuses tensors of others, by PyTorch's operators, since no kernel runs there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shape = Shape(4, 2, 64)
    with fake_devices() as (device, _):
        row = decode.compressed_time(name, "tiny", shape, 2, 64, device, torch.float32, repeats=1)
        assert row.bits is not None
        assert encode.encode_time(name, "tiny", shape, 2, 64, device, 1, torch.float32).milliseconds is not None
        monkeypatch.setattr(check, "_appends", lambda *_: True)
        found = check.check_kernels(name, "tiny", shape, 64, device, torch.float32)
        assert (found.error, found.differing_codes) == (None, 0.0)
