"""Saving and loading: a loaded cache continues as the saved one would, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_compress import CompressedCache


def compressed(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if hasattr(layer, "packed_tokens")]


def reloaded(case: Any, cache: Any, folder: Path) -> Any:
    cache.save(folder / "cache.safetensors")
    assert [path.name for path in folder.iterdir()] == ["cache.safetensors"]
    return CompressedCache.load(folder / "cache.safetensors", case.model.config)


def assert_same(one: Any, other: Any) -> None:
    """Assert that two caches hold the same tensors and report the same sizes."""
    assert one.compression == other.compression
    assert [type(layer) for layer in one.layers] == [type(layer) for layer in other.layers]
    for layer, twin in zip(one.layers, other.layers, strict=True):
        assert layer.get_seq_length() == twin.get_seq_length()
        assert torch.equal(layer.keys, twin.keys)
        assert torch.equal(layer.values, twin.values)
    for layer, twin in zip(compressed(one), compressed(other), strict=True):
        assert (layer.batch_size, layer.dtype, layer.packed_tokens) == (twin.batch_size, twin.dtype, twin.packed_tokens)
        for side, state in layer.sides.items():
            held, found = state.tensors(), twin.sides[side].tensors()
            assert held.keys() == found.keys()
            assert all(torch.equal(tensor, found[name]) for name, tensor in held.items())


def test_goes_on_bit_for_bit(case: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """A loaded cache with left padding continues bit for bit through steps past flushes, a chunk and a crop."""
    mask = torch.ones(2, 141, dtype=torch.long)
    mask[0, :9] = 0
    cache = case.cache()
    case.feed(cache, ids[:, :70], [65, 1, 4], mask)
    assert cache.packed_tokens > 0
    loaded = reloaded(case, cache, tmp_path)
    assert_same(cache, loaded)
    report, again = cache.memory_report(), loaded.memory_report()
    assert again.fields() == report.fields()
    assert again.constant_bytes == report.constant_bytes
    assert again.allocated_bytes <= report.allocated_bytes
    got, expected = (case.feed(one, ids[:, 70:120], [1, 15, 9, 20, 5], mask) for one in (loaded, cache))
    assert torch.equal(got, expected)
    for one in (loaded, cache):
        one.crop(-60)
        one.reorder_cache(torch.tensor([1, 0]))
    got, expected = (case.feed(one, ids[:, 120:160], [39, 1]) for one in (loaded, cache))
    assert torch.equal(got, expected)
    assert loaded.packed_tokens == cache.packed_tokens > 0


def test_padding_that_has_not_ended(case: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    """A cache saved within the padding of a row learns of its end from the next mask, as the saved one does."""
    mask = torch.ones(2, 120, dtype=torch.long)
    mask[1, :50] = 0
    cache = case.cache()
    case.feed(cache, ids[:, :40], [40], mask)
    loaded = reloaded(case, cache, tmp_path)
    got, expected = (case.feed(one, ids[:, 40:120], [20, *[1] * 60], mask) for one in (loaded, cache))
    assert torch.equal(got, expected)
    assert loaded.packed_tokens == cache.packed_tokens > 0
    if case.fused:
        assert loaded.padding.rows.tokens.tolist() == [0, 50]


@pytest.mark.parametrize("state", ["new", "reset", "short", "cropped to nothing", "cropped", "of another batch"])
def test_states(unfused: Any, ids: torch.Tensor, tmp_path: Path, state: str) -> None:
    """Caches saved empty, before any packing, and with odd sizes after other operations all continue alike."""
    cache = unfused.cache()
    with torch.no_grad():
        if state != "new":
            unfused.feed(cache, ids[:, : 9 if state == "short" else 75])
        if state == "reset":
            cache.reset()
        if state.startswith("cropped"):
            cache.crop(-75 if state == "cropped to nothing" else -52)
        if state == "of another batch":
            cache.batch_select_indices(torch.tensor([1]))
            cache.batch_repeat_interleave(2)
        loaded = reloaded(unfused, cache, tmp_path)
        assert loaded.get_seq_length() == cache.get_seq_length()
        got, expected = (unfused.feed(one, ids[:, 100:180], [60, 1, 16, 3]) for one in (loaded, cache))
    assert torch.equal(got, expected)
    assert loaded.packed_tokens == cache.packed_tokens > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(unfused: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """Keys and values of a model in 16 bits come back in 16 bits."""
    cache = unfused.cache()
    x = torch.randn(2, 2, 2, 150, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    prompt, rest = x.split([90, 60], 3)
    for index in range(len(cache.layers)):
        cache.update(*prompt, index)
    assert cache.packed_tokens > 0
    loaded = reloaded(unfused, cache, tmp_path)
    assert_same(cache, loaded)
    assert {layer.keys.dtype for layer in loaded.layers} == {dtype}
    for index in range(len(cache.layers)):
        got, expected = loaded.update(*rest, index), cache.update(*rest, index)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
