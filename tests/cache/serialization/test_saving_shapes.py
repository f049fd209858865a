"""Saved caches that contradict themselves or their model in batch, length, heads or head dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import as_process
from support.saved_files import Change, changed, config, filled, states
from support.small_model import small_config

from kvcache_compress import CompressedCache, KIVICache, TurboQuantCache
from kvcache_compress.cache.layer import CompressedLayer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a cache with 60 tokens."""
    filled().save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refuses(path: Path, message: str, model_config: Any = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=f"cache file '.*{path.name}': {message}"):
        CompressedCache.load(path, model_config or config(), **options)


def _state(name: str, value: int) -> Change:
    return lambda h, t, m: h["layers"][0]["state"].update({name: value})


def test_no_room_is_made_for_what_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header's sizes are compared with the tensors before memory is allocated for a layer."""
    large = [changed(path, _state("batch", 2**30)).rename(path.with_name("large"))]
    large.append(changed(path, _state("heads", 2**15)).rename(path.with_name("wide")))
    monkeypatch.setattr(CompressedLayer, "lazy_initialization", lambda *_: pytest.fail("room was made"))
    for file in large:
        refuses(file, r"layer 0: damaged: keys\.sinks is float32 \[2, 2, 4, 32\]")


@pytest.mark.parametrize(
    ("fact", "changes", "message"),
    [
        ("kv_heads", {"num_key_value_heads": 1}, "keys of layer 0 have 1 heads, where the model has 2"),
        ("head_dim", {"head_dim": 16}, "keys of layer 0 have 16 numbers per head, where the model has 32"),
    ],
)
def test_sizes_of_another_model(tmp_path: Path, fact: str, changes: dict[str, int], message: str) -> None:
    """A consistent file whose tensors do not fit the model that its header names is refused."""
    other = small_config(**changes)
    cache = TurboQuantCache(other, sink_tokens=4, recent_tokens=8)
    x = torch.randn(2, other.num_key_value_heads, 60, other.head_dim)
    for index in range(2):
        cache.update(x, x, index)
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    file = changed(tmp_path / "x", lambda h, t, m: h["model"].update({fact: 2 if fact == "kv_heads" else 32}))
    refuses(file, f"damaged: {message}", small_config())


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """A cache that `load` would refuse is not saved."""
    keys, values = states(60)
    for given, message in (
        ([(keys, values), (keys[:, :, 1:], values[:, :, 1:])], "a length of 60 in layer 0, of 59 in layer 1"),
        ([(keys, values), (keys[:1], values[:1])], "a batch of 2 in layer 0, of 1 in layer 1"),
        ([(keys[:, :1], values[:, :1])], "keys of layer 0 have 1 heads, where the model has 2"),
        ([(keys[:, :, :3].log(), values[:, :, :3])], r"layers\.0\.keys\.sinks holds NaN or infinity"),
    ):
        cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
        for index, pair in enumerate(given):
            cache.update(*pair, index)
        with pytest.raises(ValueError, match=f"the cache cannot be saved: {message}"):
            cache.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_shares_of_tensor_parallelism(path: Path, tmp_path: Path) -> None:
    """A process saves the heads that it holds; only one with the same heads loads them."""
    with as_process(1, 2):
        cache = TurboQuantCache(config(), sink_tokens=4, recent_tokens=8)
        for index in range(4):
            cache.update(*(x[:, 1:] for x in states(60, index)), index)
        assert cache.packed_tokens > 0
        cache.save(tmp_path / "share")
        filled().save(tmp_path / "whole")
    for rank, processes in ((1, 2), (3, 4)):
        with as_process(rank, processes):
            loaded = CompressedCache.load(tmp_path / "share", config())
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(loaded.layers, cache.layers, strict=True))
    for rank, processes in ((0, 1), (0, 2), (2, 4), (1, 3)):
        message = f"holds share 1 of .* divided into 2 shares: process {rank} of {processes} cannot load it"
        with as_process(rank, processes):
            refuses(tmp_path / "share", f".*{message}")
    assert CompressedCache.load(tmp_path / "whole", config()).layers[0].keys.shape == (2, 2, 60, 32)


def test_load_returns_the_class_that_it_is_called_on(tmp_path: Path) -> None:
    """A class of one method takes files of its method alone; its constructor's own arguments play no part."""
    saved = KIVICache(config(), bits=4)
    for index in range(4):
        saved.update(*states(200, index), index)
    assert saved.packed_tokens > 0
    saved.save(tmp_path / "kivi")
    for chosen in (KIVICache, CompressedCache):
        loaded = chosen.load(tmp_path / "kivi", config())
        assert type(loaded) is chosen
        assert loaded.packed_tokens == saved.packed_tokens
    with pytest.raises(ValueError, match=r"keys of kivi and values of kivi: use CompressedCache\.load"):
        TurboQuantCache.load(tmp_path / "kivi", config())
