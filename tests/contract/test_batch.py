"""Operations on the batch: rows are reordered, repeated and selected in every buffer alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

TOLERANCE = {"atol": 1e-4, "rtol": 0}

OPERATIONS: dict[str, Callable[[Any], None]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select-mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True, True])),
}


@pytest.fixture
def rows(ids: torch.Tensor) -> torch.Tensor:
    """Three different rows of tokens, `[3, 240]`."""
    return torch.cat([ids, ids.flip(1)[:1]])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_same_as_on_dense_tensors(case: Any, rows: torch.Tensor, operation: str) -> None:
    """Each operation on a cache with sinks, packed tokens and a tail, then decoding past the next flush."""
    cache, oracle = case.cache(), case.oracle()
    for one in (cache, oracle):
        case.feed(one, rows[:, :63], [60, 1, 2])
        OPERATIONS[operation](one)
    assert cache.packed_tokens > 0
    for layer, twin in zip(cache.layers, oracle.layers, strict=True):
        assert layer.keys.shape == twin.keys.shape
        torch.testing.assert_close(layer.keys, twin.keys, **TOLERANCE)
        torch.testing.assert_close(layer.values, twin.values, **TOLERANCE)
    assert cache.layers[1].batch_size == oracle.layers[1].keys.shape[0]
    batch = cache.layers[1].batch_size
    rest = torch.cat([rows, rows])[:batch, 63:94]
    sizes = [5, 5, 5, 1, 15]
    torch.testing.assert_close(case.feed(cache, rest, sizes), case.feed(oracle, rest, sizes), **TOLERANCE)
    assert cache.packed_tokens == 64


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_an_empty_cache(unfused: Any, operation: str) -> None:
    cache = unfused.cache()
    OPERATIONS[operation](cache)
    assert cache.get_seq_length() == 0


def test_after_a_batch_operation_crop_fits(case: Any, rows: torch.Tensor) -> None:
    cache, oracle = case.cache(), case.oracle()
    for one in (cache, oracle):
        case.feed(one, rows[:, :70])
        one.reorder_cache(torch.tensor([2, 0, 0]))
        one.crop(-50)
        one.batch_select_indices(torch.tensor([0, 2]))
    part = rows[:2, 70:120]
    torch.testing.assert_close(case.feed(cache, part, [46, 4]), case.feed(oracle, part, [46, 4]), **TOLERANCE)
    assert cache.packed_tokens > 0
