"""Crop: exact in the tail, decoded from codes in the packed part; removed tokens leave no trace."""

import copy
from typing import Any

import pytest
import torch
from support.closeness import assert_close_but_for_flips

TOLERANCE = {"atol": 1e-4, "rtol": 0}
LENGTH = 75
"""Tokens before the crop: 4 sinks, 32 packed, 39 in the tail, 14 of them from steps."""


def grown(case: Any, cache: Any, ids: torch.Tensor, length: int = LENGTH) -> None:
    case.feed(cache, ids[:, :length], [61, 1, length - 62])


def test_inside_the_tail_is_exact(case: Any, ids: torch.Tensor) -> None:
    """A crop within the tail is exact, as if the removed tokens had never been stored."""
    one, other = case.cache(), case.cache()
    for cache in (one, other):
        grown(case, cache, ids, length=68)
    rejected = ids[:, 200:205]
    case.feed(one, rejected, [4, 1])
    one.crop(-5)
    assert one.packed_tokens > 0
    for layer, twin in zip(one.layers, other.layers, strict=True):
        assert torch.equal(layer.keys, twin.keys)
        assert torch.equal(layer.values, twin.values)
    rest = ids[:, 68:118]
    sizes = [1, 3, 6, 16, 4, 20]
    assert torch.equal(case.feed(one, rest, sizes), case.feed(other, rest, sizes))


@pytest.mark.parametrize("removed", [39, 40, 52, 72, LENGTH, LENGTH + 40])
def test_anywhere(case: Any, ids: torch.Tensor, removed: int) -> None:
    """Crop to any length and continue: tail, edge and inside of the packed part, a sink, everything and beyond.

    In torch only, where prompt chunks use the oracle's own attention: the rounding of another one can flip codes, and
    these sizes pack tokens that chunks computed.
    """
    cache, oracle = case.cache(backend="torch"), case.oracle()
    for one in (cache, oracle):
        grown(case, one, ids)
        assert (cache.packed_tokens if one is cache else 32) == 32
        one.crop(-removed)
    left = max(0, LENGTH - removed)
    assert cache.get_seq_length() == left
    for index, (layer, twin) in enumerate(zip(cache.layers, oracle.layers, strict=True)):
        assert layer.get_seq_length() == left, f"layer {index}"
        assert_close_but_for_flips(layer.keys[:, :, :left], twin.keys)
        assert_close_but_for_flips(layer.values[:, :, :left], twin.values)
    sizes = [18, 2, 12, 45, 1]
    rest = ids[:, 100 : 100 + sum(sizes)]
    assert_close_but_for_flips(case.feed(cache, rest, sizes), case.feed(oracle, rest, sizes))
    assert cache.packed_tokens > 0


@pytest.mark.parametrize("removed", [52, 60, 70])
def test_left_padding(case: Any, ids: torch.Tensor, removed: int) -> None:
    """A crop to after a row's own sinks, into them, and into its padding, whose row then begins anew."""
    cache, oracle = case.cache(backend="torch"), case.oracle()
    sizes = [18, 2, 12, 45, 1]
    rest = ids[:, 100 : 100 + sum(sizes)]
    mask = torch.ones(2, LENGTH + sum(sizes), dtype=torch.long)
    mask[0, :13] = 0
    logits = []
    for one in (cache, oracle):
        case.feed(one, ids[:, :LENGTH], [61, 1, LENGTH - 62], mask)
        assert (cache.packed_tokens if one is cache else 32) == 32
        one.crop(-removed)
        logits.append(case.feed(one, rest, sizes, mask))
    seen = mask[:, LENGTH - removed : LENGTH - removed + sum(sizes)].bool()
    assert_close_but_for_flips(*(x[seen] for x in logits))
    assert cache.packed_tokens > 0


def test_into_the_packed_part_keeps_codes(unfused: Any, ids: torch.Tensor) -> None:
    """Whole groups keep their codes; a group that is cut is decoded into the tail."""
    cache = unfused.cache()
    with torch.no_grad():
        grown(unfused, cache, ids)
        cache.crop(-(LENGTH - 4 - 20))
    for layer in cache.layers:
        if not hasattr(layer, "packed_tokens"):
            continue
        assert layer.packed_tokens == (20 if layer.group == 1 else 0)
        assert layer.get_seq_length() == 24


def test_repeated_rejection(case: Any, ids: torch.Tensor) -> None:
    """Speculative decoding across a flush: steps of 5 tokens of which 2 are accepted."""
    cache, oracle = case.cache(), case.oracle()
    for one in (cache, oracle):
        case.feed(one, ids[:, :61])
    for step in range(9):
        part = ids[:, 61 + 5 * step : 66 + 5 * step]
        torch.testing.assert_close(case.feed(cache, part), case.feed(oracle, part), **TOLERANCE)
        cache.crop(-3)
        oracle.crop(-3)
    assert cache.get_seq_length() == 61 + 18
    assert cache.packed_tokens == 64


def test_positive_means_what_it_means_to_transformers(unfused: Any, ids: torch.Tensor) -> None:
    """A length where Transformers takes it for one, else an error that says what to write, and no change."""
    cache, oracle = unfused.cache(), unfused.oracle()
    with torch.no_grad():
        for one in (cache, oracle):
            grown(unfused, one, ids)
    assert cache.packed_tokens > 0
    before = copy.deepcopy(cache)
    try:
        oracle.crop(60)
    except ValueError:
        with pytest.raises(ValueError, match=r"crop\(60 - cache.get_seq_length\(\)\)"):
            cache.crop(60)
        for layer, twin in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(layer.keys, twin.keys)
    assert cache.get_seq_length() == oracle.get_seq_length()
    cache.crop(60 - cache.get_seq_length())
    assert cache.get_seq_length() == 60


def test_zero_changes_nothing(unfused: Any, ids: torch.Tensor) -> None:
    cache = unfused.cache()
    cache.crop(0)
    with torch.no_grad():
        grown(unfused, cache, ids)
    before = copy.deepcopy(cache)
    cache.crop(0)
    assert cache.packed_tokens == before.packed_tokens > 0
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, before.layers, strict=True))


def test_empty_cache(unfused: Any) -> None:
    cache = unfused.cache()
    cache.crop(-7)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("removed", [3, 17, 20, 30])
def test_before_anything_is_packed(case: Any, ids: torch.Tensor, removed: int) -> None:
    """Crop a prompt shorter than the window: into the tail, to the sinks, into them, and to nothing."""
    cache, oracle = case.cache(), case.oracle()
    sizes = [60, 1, 1]
    for one in (cache, oracle):
        case.feed(one, ids[:, :21])
        one.crop(-removed)
    assert cache.get_seq_length() == max(0, 21 - removed)
    rest = ids[:, 30 : 30 + sum(sizes)]
    torch.testing.assert_close(case.feed(cache, rest, sizes), case.feed(oracle, rest, sizes), **TOLERANCE)
    assert cache.packed_tokens > 0
