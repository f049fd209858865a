"""Writing into keys and values: it reaches the cache where tokens are dense, and raises where they are packed."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.closeness import assert_close_but_for_flips
from support.oracle import FEW, label

from kvcache_compress import enable_fused_attention
from kvcache_compress.storage.view import View


@pytest.fixture(params=["growing", "offloading", "static", "static_shapes"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a cache of each kind."""
    if request.param == "static_shapes":
        request.getfixturevalue("static_shapes")
    return {"max_cache_len": 230} if "static" in request.param else {"offloading": request.param == "offloading"}


@pytest.fixture
def filled(kind: dict[str, Any], unfused: Any, ids: torch.Tensor) -> Any:
    """A cache of 62 tokens: 32 packed, and 26 in the tail of the middle layer."""
    cache = unfused.cache(**kind)
    with torch.no_grad():
        unfused.feed(cache, ids[:, :62], [60, 1, 1])
    assert cache.packed_tokens == 32
    return cache


def assign(layer: Any) -> None:
    layer.keys[:, :, -1:] = 0
    layer.values[1, :, -2] = 0.5


def in_place(layer: Any) -> None:
    keys, values = layer.keys, layer.values
    keys[:, :, :2].zero_()
    keys[:, :, -1].add_(1)
    keys[:, :, -2].neg_().neg_()  # writes back what was there
    values[:, 0, -1:] *= 2
    values[:, 1, -3:].copy_(values[:, 0, -3:])
    torch.neg(values[:, 1, -1], out=values[:, 1, -1])


def through_other_tensors(layer: Any) -> None:
    layer.keys.data[:, :, -1] = 0
    layer.keys.detach()[0, :, -2].mul_(3)
    layer.values.transpose(1, 2)[:, -1:].fill_(0.25)
    copy.copy(layer.values).unbind(0)[0][:, 1, -1].sub_(1)


def write(layer: Any) -> None:
    """Write into dense tokens in the ways that foreign code may, also twice to the same."""
    for way in (assign, in_place, through_other_tensors):
        way(layer)


@pytest.mark.parametrize("case", FEW[:-1], indirect=True, ids=label)
def test_dense_tokens_are_written(case: Any, ids: torch.Tensor) -> None:
    """What is written is attended to, read back and later packed, as in a dense cache whose tokens are encoded."""
    cache, oracle = case.cache(backend="torch"), case.oracle()
    results = []
    for one in (cache, oracle):
        case.feed(one, ids[:, :62], [60, 1, 1])
        for layer in one.layers:
            write(layer)
        results.append(case.feed(one, ids[:, 62:103], [1, 2, 18, 3, 16, 1]))
    assert cache.packed_tokens == 64
    assert_close_but_for_flips(*results)
    for layer, twin in zip(cache.layers, oracle.layers, strict=True):
        assert_close_but_for_flips(layer.keys, twin.keys)
        assert_close_but_for_flips(layer.values, twin.values)


def test_each_kind_of_cache(filled: Any, unfused: Any, ids: torch.Tensor) -> None:
    """Growing and static caches take what is written, in inference mode and outside of it."""
    oracle, results = unfused.oracle(), []
    with torch.inference_mode():
        unfused.feed(oracle, ids[:, :62], [60, 1, 1])
        for cache in (filled, oracle):
            for layer in cache.layers:
                write(layer)
            results.append(unfused.feed(cache, ids[:, 62:82], [1, 16, 3]))
    assert_close_but_for_flips(*results)


def test_packed_tokens_are_refused(filled: Any) -> None:
    """A change of packed tokens raises, alone or together with dense ones, and changes neither cache nor tensor."""
    layer = filled.layers[1]
    before = layer.keys.clone()
    writes: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x[:, :, 10].zero_(),
        lambda x: x.add_(1),
        lambda x: x.__setitem__((slice(None), slice(None), slice(30, None)), 0),
        lambda x: x.data.mul_(2),
        lambda x: torch.neg(x, out=x),
        lambda x: x.mT.copy_(torch.zeros(32, 62)),
    ]
    for write in writes:
        keys = layer.keys
        with pytest.raises(
            ValueError, match=r"keys of layer 1 .* tokens 4 to 35: these 32 of 62 are packed.*first 4.*26"
        ):
            write(keys)
        assert torch.equal(keys, before)
        assert torch.equal(layer.keys, before)
    keys = layer.keys
    keys[:, :, 10] = keys[:, :, 10].clone()  # changes nothing
    assert layer.packed_tokens == 32


def test_assignment(filled: Any) -> None:
    """`+=` on an attribute, and tokens of the same shape, are written; other shapes are refused."""
    layer = filled.layers[1]
    changed = layer.keys.clone()
    changed[:, :, 36:] += 1
    layer.keys = changed
    assert torch.equal(layer.keys, changed)
    with pytest.raises(ValueError, match=r"values of layer 1 .* packed"):
        layer.values += 1
    for wrong in (changed[:, :, 5:], None, 3):
        with pytest.raises(ValueError, match=r"keys of layer 1 cannot be set to .*\(2, 2, 62, 32\).*crop\(\)"):
            layer.keys = wrong
    assert torch.equal(layer.keys, changed)
    assert layer.packed_tokens == 32


def test_tokens_to_be_packed_stay_finite(unfused: Any, ids: torch.Tensor, kind: dict[str, Any]) -> None:
    """Before anything is packed, all tokens can be written, but not with NaN."""
    cache = unfused.cache(**kind)
    with torch.no_grad():
        unfused.feed(cache, ids[:, :20], [19, 1])
    layer = cache.layers[1]
    expected = layer.keys + 1
    layer.keys += 1
    with pytest.raises(ValueError, match="keys of layer 1 hold NaN"):
        layer.keys[:, :, -1] = torch.nan
    assert torch.equal(layer.keys, expected)


@pytest.mark.parametrize("count", [1, 20])
def test_views(filled: Any, unfused: Any, count: int) -> None:
    """Writes into a view of a step or a chunk reach the cache, and whoever reads the view afterwards."""
    enable_fused_attention(unfused.model)
    fresh = torch.randn(2, 2, count, 32, generator=torch.Generator().manual_seed(count))
    keys, values = filled.update(fresh, -fresh, 1)
    assert isinstance(keys, View)
    layer = filled.layers[1]
    last = layer.get_seq_length() - 1
    keys[:, :, last] = 0
    values[:, :, :1] += 1
    assert not keys[:, :, last].any()
    assert not layer.keys[:, :, last].any()
    assert torch.equal(layer.values[:, :, :1], values[:, :, :1])
    before = values.dense().clone()
    with pytest.raises(ValueError, match="packed"):
        values *= 2
    assert torch.equal(values.dense(), before)
    assert layer.packed_tokens > 0


def test_old_tensors_are_their_own(filled: Any, unfused: Any) -> None:
    """After a step, a crop, other rows or a reset a tensor is its own: all of it can be written, and nobody sees it."""
    enable_fused_attention(unfused.model)
    fresh = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(3))
    changes: list[Callable[[Any], Any]] = [
        lambda cache: cache.update(fresh, fresh, 1),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: (cache.crop(-1), cache.update(fresh, fresh, 1)),
        lambda cache: (cache.reset(), cache.update(fresh, fresh, 1)),
    ]
    for change in changes:
        cache = copy.deepcopy(filled)
        handle, _ = cache.update(fresh, -fresh, 1)
        decoded, layer = cache.layers[1].keys, cache.layers[1]
        change(cache)
        now, held = layer.keys.clone(), handle.dense().clone()
        decoded.zero_()
        handle[:, :, -1] = 7
        assert not decoded.any()
        assert torch.equal(handle.dense(), held)
        assert torch.equal(layer.keys, now)
        assert held.shape[2] > 36


def test_results_are_plain_tensors(filled: Any) -> None:
    """Only views stay tied to the cache: results, copies and pickled tensors are plain and their own."""
    keys, before = filled.layers[1].keys, filled.layers[1].keys.clone()
    plain = [keys.clone(), torch.cat([keys, keys], 2), copy.deepcopy(keys), pickle.loads(pickle.dumps(keys)), keys * 2]
    assert all(type(x) is torch.Tensor for x in plain)
    for x in plain:
        x.zero_()
    assert torch.equal(filled.layers[1].keys, before)
    assert torch.equal(keys, before)


@pytest.mark.parametrize("unfused", ["turboquant-4"], indirect=True)
def test_compiled_code_reads(unfused: Any, ids: torch.Tensor) -> None:
    cache = unfused.cache()
    with torch.no_grad():
        unfused.feed(cache, ids[:, :62], [60, 1, 1])
    assert cache.packed_tokens > 0
    keys = cache.layers[1].keys
    found = torch.compile(lambda x: x[:, :, 1:] @ x.mT, backend="eager", fullgraph=True)(keys)
    assert torch.equal(found, keys[:, :, 1:] @ keys.mT)
