"""Operations on the batch: rows are reordered, repeated and selected in every buffer alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from transformers import DynamicCache

from kvcache_compress import CompressedCache

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
    """Batch operations on sinks, packed tokens and tail, then decoding past the next flush, equal dense tensors."""
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


ALL_NONE: dict[str, dict[str, Any]] = {
    "plain": {"keys": "none", "values": "none"},
    "ruled": {"keys": "turboquant", "values": "turboquant", "layers": [{"match": "0-2", "method": "none"}]},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("config", ALL_NONE.values(), ids=ALL_NONE)
def test_layers_that_are_all_none(tiny_model: Any, rows: torch.Tensor, config: dict[str, Any], operation: str) -> None:
    """A cache of only Transformers' own layers supports batch operations, and its errors are Transformers'."""
    cache, dense = CompressedCache(tiny_model.config, config), DynamicCache(config=tiny_model.config)
    with torch.no_grad():
        for one in (cache, dense):
            tiny_model(rows[:, :20], **with_cache(one))
            OPERATIONS[operation](one)
        batch = dense.layers[0].keys.shape[0]
        assert [layer.keys.shape[0] for layer in cache.layers] == [batch] * len(dense.layers)
        rest = rows.repeat(2, 1)[:batch, 20:23]
        got, expected = (tiny_model(rest, **with_cache(one)).logits for one in (cache, dense))
    assert torch.equal(got, expected)
    with pytest.raises(IndexError):
        cache.batch_select_indices([0, batch])
    with pytest.raises(ValueError, match="beam_idx"):
        cache.reorder_cache("first")
    assert [layer.keys.shape[0] for layer in cache.layers] == [batch] * len(dense.layers)


@pytest.mark.parametrize("capacity", [None, 60])
def test_beams_of_layers_that_are_all_none(tiny_model: Any, ids: torch.Tensor, capacity: int | None) -> None:
    expected = tiny_model.generate(ids[:, :20], num_beams=4, do_sample=False, max_new_tokens=12)
    for config in ALL_NONE.values():
        cache = CompressedCache(tiny_model.config, {**config, "max_cache_len": capacity})
        how = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12, "disable_compile": True}
        assert torch.equal(tiny_model.generate(ids[:, :20], **with_cache(cache), **how), expected)


def test_rows_are_counted_by_the_layer_that_has_some(tiny_model: Any, rows: torch.Tensor) -> None:
    """A missing row is refused before Transformers' own layers, which come first, are changed."""
    config = {"keys": "kivi", "values": "kivi", "layers": [{"match": 0, "method": "none"}]}
    cache = CompressedCache(tiny_model.config, config)
    x = torch.randn(3, 2, 5, 32)
    cache.update(x, x, 0)
    with pytest.raises(IndexError):
        cache.batch_select_indices([3])
    cache.batch_select_indices([2])
    assert torch.equal(cache.layers[0].keys, x[2:])
