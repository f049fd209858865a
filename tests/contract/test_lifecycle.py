"""Copies, saving, moves between devices, resets, inference mode and gradients, and the sizes that caches report."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import few
from transformers import DynamicCache, StaticCache

from kvcache_compress import CompressedCache, enable_fused_attention

STATES: dict[str, tuple[list[int], int]] = {
    "empty": ([], 0), "short": ([20], 0), "packed": ([65, 1, 4], 0), "padded": ([65, 1, 4], 9),
    "in the padding of a row": ([40], 50), "cropped": ([65, 10], 0), "of another batch": ([65, 10], 0),
}  # fmt: skip
"""Sizes of the steps before, and padding of the first row."""


def stored(cache: Any, packed: list[int] | None = None) -> list[torch.Tensor]:
    """A copy of the packed bytes of all layers, or of their first tokens."""
    layers = cache.compressed_layers.values()
    counts = packed or [layer.packed_tokens for layer in layers]
    return [
        field.clone()
        for layer, count in zip(layers, counts, strict=True)
        for side in layer.sides.values()
        for field in side.store.read(0, count)
    ]


def assert_same(one: Any, other: Any) -> None:
    """Assert that two caches hold the same tensors and report the same sizes."""
    assert one.compression == other.compression
    assert int(one.get_seq_length()) == int(other.get_seq_length())
    assert one.batch_size == other.batch_size
    for layer, twin in zip(one.compressed_layers.values(), other.compressed_layers.values(), strict=True):
        assert layer.packed_tokens == twin.packed_tokens
        for side, state in layer.sides.items():
            held, found = state.tensors(), twin.sides[side].tensors()
            assert held.keys() == found.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in held.items())


def reloaded(cache: Any, folder: Path, config: Any) -> Any:
    cache.save(folder / "cache.safetensors")
    assert [path.name for path in folder.iterdir()] == ["cache.safetensors"]
    loaded = CompressedCache.load(folder / "cache.safetensors", config)
    report, again = cache.memory_report(), loaded.memory_report()
    assert again.fields == report.fields
    assert again.allocated_bytes <= report.allocated_bytes
    return loaded


@few
@pytest.mark.parametrize(
    ("way", "state"), [*((way, state) for way in ("copied", "saved") for state in STATES), ("moved", "padded")]
)
def test_goes_on_bit_for_bit(case: Any, ids: torch.Tensor, tmp_path: Path, way: str, state: str) -> None:
    """Copied, loaded and moved caches continue like the original, across flushes, and leave it unchanged."""
    sizes, padding = STATES[state]
    mask = torch.ones(2, 240, dtype=torch.long)
    mask[0, :padding] = 0
    cache = case.cache()
    start = sum(sizes)
    if sizes:
        case.feed(cache, ids[:, :start], sizes, mask if padding else None)
    if state == "cropped":
        cache.crop(-52)
    if state == "of another batch":
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
    other = copy.deepcopy(cache)
    if way == "saved":
        other = reloaded(cache, tmp_path, case.model.config)
    if way == "moved":
        for layer in other.layers:
            layer.offload()
            layer.prefetch()
    assert_same(cache, other)
    packed, before = [layer.packed_tokens for layer in cache.compressed_layers.values()], stored(cache)
    assert min(packed) > 0 or state in ("empty", "short", "in the padding of a row", "cropped")

    def go_on(one: Any) -> torch.Tensor:
        steps = [1, 15, 9, 30, 5] if start else [60, 1, 15]
        found = [case.feed(one, ids[:, start : start + sum(steps)], steps, mask if padding else None)]
        one.crop(-20)
        one.reorder_cache(torch.tensor([1, 0]))
        found.append(case.feed(one, ids[:, 160:200], [*[1] * 10, 16, 14]))
        return torch.cat(found, 1)

    first = go_on(other)
    assert other.packed_tokens > max(packed)
    assert int(cache.get_seq_length()) == (23 if state == "cropped" else start)
    assert all(torch.equal(*both) for both in zip(stored(cache), before, strict=True))
    assert torch.equal(go_on(cache), first)
    if state in ("packed", "padded"):
        now = stored(cache, packed)
        rows = [field.flip(0) for field in before]  # which `go_on` reordered
        assert all(torch.equal(*both) for both in zip(now, rows, strict=True)), "packed tokens never change"


@few
def test_sizes_and_tokens(case: Any, ids: torch.Tensor) -> None:
    """A cache reports itself as a dense one does; `keys` and `values` are None before the first token."""
    cache, dense = case.cache(), DynamicCache()
    assert all(layer.keys is None and layer.values is None for layer in cache.layers)
    for one in (cache, dense):
        case.feed(one, ids[:, :90])
    assert cache.packed_tokens > 0
    assert cache.get_mask_sizes(5, 1) == dense.get_mask_sizes(5, 1)
    assert cache.get_max_length() == dense.get_max_length()
    assert cache.is_croppable
    assert not cache.is_compileable
    assert cache.is_sliding == [False] * 3


@few
@pytest.mark.parametrize("first", [True, False], ids=["made-in-inference-mode", "used-in-inference-mode"])
def test_inference_mode_and_not(case: Any, ids: torch.Tensor, first: bool, capacity: int | None) -> None:
    cache, expected = case.cache(max_cache_len=capacity), case.cache(max_cache_len=capacity)
    with torch.inference_mode(first), torch.no_grad():
        case.feed(cache, ids[:, :70], [60, 10])
    with torch.inference_mode(not first), torch.no_grad():
        twin = copy.deepcopy(cache)
        got, same = (case.feed(one, ids[:, 70:101], [1, 9, *[3] * 7]).clone() for one in (cache, twin))
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([1, 0]))
        case.feed(cache, ids[:, 110:112], [1, 1])
    reference = case.feed(expected, ids[:, :101], [60, 10, 1, 9, *[3] * 7])[:, 70:]
    assert expected.packed_tokens == twin.packed_tokens == 64
    assert torch.equal(got, reference)
    assert torch.equal(same, reference)


@pytest.mark.parametrize("fused", [False, True])
def test_none_everywhere_is_transformers_own_cache(
    tiny_model: Any, unfused: Any, ids: torch.Tensor, fused: bool
) -> None:
    """With `none` for both sides, set at the top or by a rule, the cache equals Transformers' own bit for bit."""
    plain = {"keys": "none", "values": "none"}
    ruled = unfused.config.model_dump() | {"layers": [{"match": "0-2", "method": "none"}]}
    with torch.no_grad():
        expected = unfused.feed(DynamicCache(), ids[:, :90], [60, 20, 1, 4, 5])
        static = unfused.feed(StaticCache(tiny_model.config, 100), ids[:, :62], [60, 1, 1])
        if fused:
            enable_fused_attention(tiny_model)
        for config in (plain, ruled):
            cache = CompressedCache(tiny_model.config, config)
            assert torch.equal(unfused.feed(cache, ids[:, :90], [60, 20, 1, 4, 5]), expected)
            assert cache.packed_tokens == 0
            cache = CompressedCache(tiny_model.config, {**config, "max_cache_len": 100})
            assert torch.equal(unfused.feed(cache, ids[:, :62], [60, 1, 1]), static)
            with pytest.raises(ValueError, match="StaticLayer cannot be cropped"):
                cache.crop(-1)


@pytest.mark.parametrize("capacity", ["growing", "static"], indirect=True)
def test_iterates_as_a_dynamic_cache(unfused: Any, ids: torch.Tensor, capacity: int | None) -> None:
    """Layers are iterated over before the first token, with packed tokens, and into a `DynamicCache`."""
    cache = unfused.cache(max_cache_len=capacity)
    assert [x[:2] for x in cache] == [x[:2] for x in DynamicCache(config=unfused.model.config)]
    with torch.no_grad():
        unfused.feed(cache, ids[:, :70], [60, 10])
    assert cache.packed_tokens > 0
    for (keys, values, *sliding), layer in zip(cache, cache.layers, strict=True):
        assert torch.equal(keys, layer.keys)
        assert torch.equal(values, layer.values)
        assert not any(sliding)
    copied = DynamicCache(cache)
    assert copied.get_seq_length() == 70
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(copied.layers, cache.layers, strict=True))
