"""Reset, copies, moves between devices, immutability of stored tokens, and reported sizes."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention

TOLERANCE = {"atol": 1e-4, "rtol": 0}


def compressed(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "packed_tokens")]


def stored(layer: Any) -> list[torch.Tensor]:
    """A copy of every packed byte of a layer."""
    packed = layer.packed_tokens
    return [field.clone() for side in layer.sides.values() for field in side.store.read(0, packed)]


def test_reset_then_reuse(case: Any, ids: torch.Tensor) -> None:
    """A reset cache behaves like a new one, bit for bit, also with another batch size."""
    used = case.cache()
    case.feed(used, ids[:, 100:180], [75, 5])
    assert used.packed_tokens > 0
    used.reset()
    assert used.get_seq_length() == used.packed_tokens == 0
    part, sizes = ids[:1, :90], [60, *[2] * 15]
    new = case.cache()
    assert torch.equal(case.feed(used, part, sizes), case.feed(new, part, sizes))
    assert used.packed_tokens == new.packed_tokens > 0


def test_deepcopy_is_independent(case: Any, ids: torch.Tensor) -> None:
    """Decoding with a copy, across a flush, leaves the original unchanged; both then agree."""
    original = case.cache()
    case.feed(original, ids[:, :70])
    keys = [layer.keys.clone() for layer in original.layers]
    values = [layer.values.clone() for layer in original.layers]
    bytes_before = [stored(layer) for layer in compressed(original)]
    twin = copy.deepcopy(original)
    first = case.feed(twin, ids[:, 70:110], [2, 18, 1, 1, 16, 2])
    assert twin.packed_tokens > original.packed_tokens > 0
    assert original.get_seq_length() == 70
    for layer, k, v in zip(original.layers, keys, values, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
    for layer, fields in zip(compressed(original), bytes_before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(stored(layer), fields, strict=True))
    assert torch.equal(case.feed(original, ids[:, 70:110], [2, 18, 1, 1, 16, 2]), first)


def test_deepcopy_before_the_first_token(case: Any, ids: torch.Tensor) -> None:
    """Copies of an empty cache set their own statistics."""
    original = case.cache()
    twin = copy.deepcopy(original)
    case.feed(twin, ids[:, 120:200])
    got, expected = case.feed(original, ids[:, :70], [60, 10]), case.feed(case.cache(), ids[:, :70], [60, 10])
    assert original.packed_tokens > 0
    assert torch.equal(got, expected)


def test_copy_between_prefill_and_first_flush(case: Any, ids: torch.Tensor) -> None:
    """Copies made before anything is packed share neither packed tokens nor statistics later."""
    original = case.cache()
    case.feed(original, ids[:, :20])
    twin = copy.deepcopy(original)
    case.feed(twin, ids[:, 150:220], [69, 1])
    fresh = case.cache()
    case.feed(fresh, ids[:, :20])
    got, expected = case.feed(original, ids[:, 20:80], [58, 2]), case.feed(fresh, ids[:, 20:80], [58, 2])
    assert original.packed_tokens > 0
    assert torch.equal(got, expected)
    alone = case.cache()
    case.feed(alone, torch.cat([ids[:, :20], ids[:, 150:220]], 1), [20, 69, 1])
    assert torch.equal(case.feed(twin, ids[:, 90:95]), case.feed(alone, ids[:, 90:95]))


def test_copy_follows_the_model(unfused: Any, ids: torch.Tensor) -> None:
    """Switching fused attention on and off applies to copies as well."""
    with torch.no_grad():
        cache = unfused.cache()
        unfused.feed(cache, ids[:, :70])
        twin = copy.deepcopy(cache)
        enable_fused_attention(unfused.model)
        assert all(layer.fused for layer in compressed(cache) + compressed(twin))
        disable_fused_attention(unfused.model)
        assert not any(layer.fused for layer in compressed(cache) + compressed(twin))


def test_stored_tokens_are_immutable(case: Any, ids: torch.Tensor) -> None:
    """Stored bytes never change, whatever is appended."""
    cache = case.cache()
    case.feed(cache, ids[:, :70])
    before = [(layer.packed_tokens, stored(layer)) for layer in compressed(cache)]
    assert all(packed > 0 for packed, _ in before)
    case.feed(cache, ids[:, 70:200], [50, *[16] * 5])
    for layer, (packed, fields) in zip(compressed(cache), before, strict=True):
        assert layer.packed_tokens > packed
        now = [f for side in layer.sides.values() for f in side.store.read(0, packed)]
        assert all(torch.equal(a, b) for a, b in zip(now, fields, strict=True))


def test_offload_and_prefetch(case: Any, ids: torch.Tensor) -> None:
    cache, other = case.cache(), case.cache()
    for one in (cache, other):
        case.feed(one, ids[:, :70], [60, 10])
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    rest = ids[:, 70:110]
    assert torch.equal(case.feed(cache, rest, [1, 16, 16, 6, 1]), case.feed(other, rest, [1, 16, 16, 6, 1]))
    assert cache.packed_tokens > 0


def test_sizes(case: Any, ids: torch.Tensor) -> None:
    """`get_seq_length`, `get_mask_sizes` and `get_max_length` agree with a dense cache at every step."""
    cache, dense = case.cache(), DynamicCache()
    assert cache.get_seq_length() == 0
    assert [layer.get_mask_sizes(9) for layer in compressed(cache)] == [(9, 0)] * len(compressed(cache))
    at = 0
    for size in [40, 1, 7, 30, 1]:
        for one in (cache, dense):
            case.feed(one, ids[:, at : at + size])
        at += size
        for index in range(len(cache.layers)):
            assert cache.get_seq_length(index) == dense.get_seq_length(index) == at
            assert cache.get_mask_sizes(5, index) == dense.get_mask_sizes(5, index) == (at + 5, 0)
    assert cache.packed_tokens > 0
    assert cache.get_max_length() == dense.get_max_length() == -1
    assert cache.batch_size == 2
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_sliding == [False] * 3


def test_dense_properties(case: Any, ids: torch.Tensor) -> None:
    """`keys` and `values` decode everything, before and after packing, and are None before the first token."""
    cache, oracle = case.cache(), case.oracle()
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    for part in (ids[:, :30], ids[:, 30:170], ids[:, 170:175]):
        case.feed(cache, part)
        case.feed(oracle, part)
        for layer, twin in zip(cache.layers, oracle.layers, strict=True):
            assert layer.keys.dtype == torch.float32
            torch.testing.assert_close(layer.keys, twin.keys, **TOLERANCE)
            torch.testing.assert_close(layer.values, twin.values, **TOLERANCE)
    assert cache.packed_tokens > 0


@pytest.mark.parametrize("first", [True, False], ids=["made-in-inference-mode", "used-in-inference-mode"])
def test_inference_mode_and_not(case: Any, ids: torch.Tensor, first: bool) -> None:
    """A cache filled in inference mode works outside it, and the other way round; so do its copies."""
    cache, expected = case.cache(), case.cache()
    with torch.inference_mode(first), torch.no_grad():
        case.feed(cache, ids[:, :70], [60, 10])
    with torch.inference_mode(not first), torch.no_grad():
        twin = copy.deepcopy(cache)
        got, same = (case.feed(one, ids[:, 70:101], [1, 9, *[3] * 7]) for one in (cache, twin))
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([1, 0]))
        case.feed(cache, ids[:, 110:112], [1, 1])
    reference = case.feed(expected, ids[:, :101], [60, 10, 1, 9, *[3] * 7])[:, 70:]
    assert expected.packed_tokens == twin.packed_tokens == 64
    assert torch.equal(got, reference)
    assert torch.equal(same, reference)


def test_gradients_on(case: Any, ids: torch.Tensor) -> None:
    """Without `torch.no_grad` the cache holds no graph, and the results are the same."""
    if case.fused and case.name == "spectral-prefill":
        pytest.skip("where gradients are wanted its statistics follow from keys alone")
    cache, expected = case.cache(), case.cache()
    sizes = [60, 10, 1, 9, *[3] * 7]
    with torch.enable_grad():
        got = case.feed(cache, ids[:, :101], sizes)
        last = case.model.model.layers[-1].self_attn.q_proj.weight
        (gradient,) = torch.autograd.grad(got[:, -1].square().sum(), [last])
    assert got.requires_grad
    assert gradient.abs().sum() > 0
    assert not any(state.tail.buffer.requires_grad for layer in compressed(cache) for state in layer.sides.values())
    assert not any(tensor.requires_grad for layer in compressed(cache) for tensor in stored(layer))
    torch.testing.assert_close(got.detach(), case.feed(expected, ids[:, :101], sizes), **TOLERANCE)
    assert cache.packed_tokens == 64


@pytest.mark.parametrize("fused", [False, True])
def test_none_everywhere_is_a_dynamic_cache(tiny_model: Any, unfused: Any, ids: torch.Tensor, fused: bool) -> None:
    """With `none` for both sides, set at the top or by a rule, the cache equals Transformers' own bit for bit."""
    plain = {"keys": "none", "values": "none"}
    ruled = unfused.config.model_dump() | {"layers": [{"match": "0-2", "method": "none"}]}
    with torch.no_grad():
        expected = unfused.feed(DynamicCache(), ids[:, :90], [60, 20, 1, 4, 5])
        if fused:
            enable_fused_attention(tiny_model)
        for config in (plain, ruled):
            cache = CompressedCache(tiny_model.config, config)
            assert torch.equal(unfused.feed(cache, ids[:, :90], [60, 20, 1, 4, 5]), expected)
            assert cache.packed_tokens == 0


@pytest.mark.parametrize("capacity", [None, 100])
def test_iterates_as_a_dynamic_cache(unfused: Any, ids: torch.Tensor, capacity: int | None) -> None:
    """Layers are iterated over before the first token, with packed tokens, and into a `DynamicCache`; also twice."""
    cache = unfused.cache(max_cache_len=capacity)
    empty = [x[:2] for x in cache]
    assert empty == [x[:2] for x in DynamicCache(config=unfused.model.config)]
    with torch.no_grad():
        unfused.feed(cache, ids[:, :70], [60, 10])
    assert cache.packed_tokens > 0
    for (keys, values, *sliding), layer in zip(cache, cache.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)
        assert not any(sliding)
    copied = DynamicCache(cache)
    assert copied.get_seq_length() == (100 if capacity and unfused.name == "mixed" else 70)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(copied.layers, cache.layers, strict=True))


@pytest.mark.parametrize("capacity", [None, 100])
def test_batch_size_is_of_the_tokens_held(unfused: Any, ids: torch.Tensor, capacity: int | None) -> None:
    """Without tokens, before the first and after a reset, the batch size is unknown (-1) and the next may be any."""
    if capacity and unfused.name == "mixed":
        pytest.skip("Transformers' own static layers keep their batch size")
    cache = unfused.cache(max_cache_len=capacity)
    with torch.no_grad():
        for rows in (2, 1):
            assert cache.batch_size == -1
            assert cache.get_seq_length() == 0
            unfused.feed(cache, ids[:rows, :60])
            assert cache.batch_size == rows
            assert cache.packed_tokens > 0
            cache.reset()
    assert cache.batch_size == -1
    assert not hasattr(cache.compressed_layers[1], "cumulative_length")
