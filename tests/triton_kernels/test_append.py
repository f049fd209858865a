"""New keys and values into the tails by one kernel."""

from __future__ import annotations

import pytest
import torch

from kvcache_compress.side import append
from kvcache_compress.store import TailBuffer
from kvcache_compress.triton_kernels import append as kernel

SIDES = ("keys", "values")


class Side:
    def __init__(self, tail: TailBuffer) -> None:
        self.tail = tail


@pytest.mark.parametrize(
    ("count", "dims", "dtype"),
    [
        (1, (64, 64), torch.bfloat16),
        (3, (80, 80), torch.float16),
        (16, (128, 96), torch.float32),
        (5, (36, 128), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_copies(count: int, dims: tuple[int, int], dtype: torch.dtype, transposed: bool) -> None:
    """With what lies around the new tokens left as it was."""
    given = []
    for dim in dims:
        x = torch.randn(2, count, 3, dim).to(dtype).transpose(1, 2)
        given.append(x if transposed else x.contiguous())
    tails = [TailBuffer(x, 21) for x in given]
    sides = {name: Side(tail) for name, tail in zip(SIDES, tails, strict=True)}
    for tail, x in zip(tails, given, strict=True):
        tail.buffer.fill_(7)
        tail.append(x[:, :, :1])
    before = [tail.buffer.clone() for tail in tails]
    append(sides, *given, 0, "triton")
    for tail, x, old in zip(tails, given, before, strict=True):
        old[:, :, 1 : 1 + count] = x
        torch.testing.assert_close(tail.buffer, old, atol=0, rtol=0)
        assert tail.tokens == 1 + count


def test_only_steps_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(kernel, "append", lambda keys, *_: calls.append(keys.shape[2]))
    for count in (0, 1, 16, 17):
        x = torch.randn(1, 2, count, 64)
        append({name: Side(TailBuffer(x, 40)) for name in SIDES}, x, x, 0, "triton")
    columns = torch.randn(1, 2, 64, 4).mT
    append({name: Side(TailBuffer(columns, 40)) for name in SIDES}, columns, columns, 0, "triton")
    assert calls == [1, 16]
