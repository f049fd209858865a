"""The append kernel: new keys and values into the tails in one launch."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.storage.checks import PackableChecks
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.packed_store import TailBuffer
from kvcache_compress.storage.side import Windows
from kvcache_compress.triton_kernels.update import append as kernel

SIDES = ("keys", "values")


def with_tails(tails: Sequence[TailBuffer]) -> DynamicStorage:
    """Storage with the Triton backend that has only tails."""
    codec = SimpleNamespace(least_tokens=lambda in_step=False: 0)
    sides: Any = {name: SimpleNamespace(tail=tail, codec=codec) for name, tail in zip(SIDES, tails, strict=True)}
    windows = Windows(sinks=0, recent=8, flush=32, group=1)
    return DynamicStorage(sides, windows, PackableChecks(0), BACKENDS["triton"])


@pytest.mark.parametrize(
    ("count", "dims", "dtype", "transposed"),
    [
        (1, (64, 64), torch.bfloat16, False),
        (3, (80, 80), torch.float16, True),
        (16, (128, 96), torch.float32, True),
        (5, (36, 128), torch.bfloat16, False),
    ],
)
def test_equals_copies(count: int, dims: tuple[int, int], dtype: torch.dtype, transposed: bool) -> None:
    given = []
    for dim in dims:
        x = torch.randn(2, count, 3, dim).to(dtype).transpose(1, 2)
        given.append(x if transposed else x.contiguous())
    tails = [TailBuffer(x, 21) for x in given]
    storage = with_tails(tails)
    for tail, x in zip(tails, given, strict=True):
        tail.buffer.fill_(7)
        tail.append(x[:, :, :1])
    before = [tail.buffer.clone() for tail in tails]
    storage._add(*given, 0)
    for tail, x, old in zip(tails, given, before, strict=True):
        old[:, :, 1 : 1 + count] = x
        torch.testing.assert_close(tail.buffer, old, atol=0, rtol=0)
        assert tail.tokens == 1 + count


def test_only_steps_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(kernel, "append", lambda keys, *_: calls.append(keys.shape[2]))
    for count in (0, 1, 16, 17):
        x = torch.randn(1, 2, count, 64)
        with_tails([TailBuffer(x, 40) for _ in SIDES])._add(x, x, 0)
    columns = torch.randn(1, 2, 64, 4).mT
    with_tails([TailBuffer(columns, 40) for _ in SIDES])._add(columns, columns, 0)
    assert calls == [1, 16]
