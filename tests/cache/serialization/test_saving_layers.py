"""Saved caches with layers that are Transformers' own, or of static capacity."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import family_cases
from support.cache_name import with_cache
from support.saved_files import Change, changed, filled
from support.small_model import HEAD_DIM, HEADS, small_config

from kvcache_compress import CompressedCache
from kvcache_compress.cache.serialization import cache_file as saving


def refuses(path: Path, message: str, model_config: Any) -> None:
    with pytest.raises(ValueError, match=f"cache file '{re.escape(str(path))}': {message}"):
        CompressedCache.load(path, model_config)


def _attribute(layer: int, name: str, value: Any) -> Change:
    return lambda h, t, m: h["layers"][layer]["attributes"].update({name: value})


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_next", "gemma2"])
def test_other_layers(family: str, tmp_path: Path) -> None:
    """Sliding, linear, hybrid and shared layers continue as they would have, past their window and when empty."""
    model = family_cases.model(family)
    config = family_cases.method_config(family, "turboquant")
    empty = CompressedCache(model.config, config)
    empty.save(tmp_path / "empty")
    cache = CompressedCache.load(tmp_path / "empty", model.config)
    ids = torch.randint(1, family_cases.VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (ids[:, :70], ids[:, 70:71]):
            model(input_ids=part, **with_cache(cache))
        assert cache.packed_tokens > 0
        cache.save(tmp_path / "x")
        loaded = CompressedCache.load(tmp_path / "x", model.config)
        assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
        for part in (ids[:, 71:72], ids[:, 72:89], ids[:, 89:]):
            got, expected = (model(input_ids=part, **with_cache(one)).logits for one in (loaded, cache))
            assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_static_layers(family: str, tmp_path: Path) -> None:
    """A cache with `max_cache_len`, beside static layers that slide, continues as it would have."""
    model = family_cases.model(family)
    config = family_cases.method_config(family, "commvq" if family == "llama" else "turboquant")
    cache = CompressedCache(model.config, config.model_copy(update={"max_cache_len": 100}))
    ids = torch.randint(1, family_cases.VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (ids[:, :70], ids[:, 70:71]):
            model(input_ids=part, **with_cache(cache))
        assert cache.packed_tokens > 0
        cache.save(tmp_path / "x")
        loaded = CompressedCache.load(tmp_path / "x", model.config)
        assert int(loaded.get_seq_length()) == 71
        for part in (ids[:, 71:72], *ids[:, 72:76].split(1, 1), ids[:, 76:]):
            got, expected = (model(input_ids=part, **with_cache(one)).logits for one in (loaded, cache))
            assert torch.equal(got, expected)
    index = next(i for i, layer in enumerate(cache.layers) if hasattr(layer, "packed_tokens"))
    changes = {"max_cache_len": 60}
    refuses(changed(tmp_path / "x", lambda h, t, m: h["config"].update(changes)), "layer .: damaged", model.config)
    assert cache.layers[index].max_cache_len == 100


def test_other_layers_changed_by_hand(tmp_path: Path) -> None:
    family = family_cases.model("gemma3")
    cache = CompressedCache(family.config, family_cases.method_config("gemma3", "turboquant"))
    with torch.no_grad():
        family(input_ids=torch.ones(2, 60, dtype=torch.long), **with_cache(cache))
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    index = next(i for i, layer in enumerate(cache.layers) if layer.is_sliding)
    for name, value in (("sliding_window", 8), ("cumulative_length", 5), ("cumulative_length", -1), ("keys", None)):
        refuses(changed(tmp_path / "x", _attribute(index, name, value)), f"layer {index}: damaged", family.config)

    def other_window(header: Any, tensors: Any, metadata: Any) -> None:
        tensors[f"layers.{index}._sliding_window_tensor"].add_(1)

    refuses(changed(tmp_path / "x", other_window), ".*_sliding_window_tensor", family.config)


def test_rows_of_a_state(tmp_path: Path) -> None:
    """A state of linear attention whose batch size differs from the other layers is refused."""
    model = family_cases.model("qwen3_next")
    cache = CompressedCache(model.config, family_cases.method_config("qwen3_next", "turboquant"))
    with torch.no_grad():
        model(input_ids=torch.ones(2, 60, dtype=torch.long), **with_cache(cache))
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")

    def one_row(header: Any, tensors: Any, metadata: Any) -> None:
        for name in [name for name in tensors if "_states" in name]:
            tensors[name] = tensors[name][:1].clone()

    refuses(changed(tmp_path / "x", one_row), "damaged: a batch of 1 in layer 0, of 2 in layer 1", model.config)
    size = _attribute(0, "conv_kernel_size", {"items": {"0": 3}})
    refuses(changed(tmp_path / "x", size), "layer 0: damaged: conv_kernel_size=3 for a state of shape", model.config)

    def no_number(header: Any, tensors: Any, metadata: Any) -> None:
        tensors["layers.0.conv_states.0"].view(-1)[-1:] = torch.nan

    refuses(changed(tmp_path / "x", no_number), r"damaged: layers\.0\.conv_states\.0 holds NaN", model.config)


def test_sizes_of_static_layers(tmp_path: Path) -> None:
    model = family_cases.model("gemma3")
    config = family_cases.method_config("gemma3", "turboquant").model_copy(update={"max_cache_len": 100})
    cache = CompressedCache(model.config, config)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 60, dtype=torch.long), **with_cache(cache))
    assert cache.packed_tokens > 0
    cache.save(tmp_path / "x")
    index = next(i for i, layer in enumerate(cache.layers) if layer.is_sliding)
    for name in ("batch_size", "num_heads", "k_head_dim", "v_head_dim"):
        refuses(changed(tmp_path / "x", _attribute(index, name, 5)), f"layer {index}: damaged: {name}=5", model.config)
    longer = changed(tmp_path / "x", _attribute(index, "cumulative_length_int", 61))
    refuses(longer, "damaged: a length of 61 in layer 0, of 60 in layer 1", model.config)
    shorter = changed(tmp_path / "x", _attribute(index, "cumulative_length_int", 0))
    refuses(shorter, "damaged: a length of 0 in layer 0, of 60 in layer 1", model.config)

    def beyond(header: Any, tensors: Any, metadata: Any) -> None:
        tensors[f"layers.{index}.cumulative_length"].fill_(100)

    refuses(changed(tmp_path / "x", beyond), f"layer {index}: damaged: lengths of 60 and 100 in a window", model.config)


def test_a_state_beside_keys_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_cases.model("falcon_h1")
    cache = CompressedCache(model.config, family_cases.method_config("falcon_h1", "turboquant"))
    with pytest.raises(ValueError, match="layer 0, with a recurrent state beside its keys and values, cannot be saved"):
        cache.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(saving, "LinearAttentionAndFullAttentionLayer", ())
    cache.save(tmp_path / "x")
    monkeypatch.undo()
    refuses(tmp_path / "x", "layer 0: damaged: a layer with a recurrent state cannot be saved", model.config)


def test_layers_of_an_unknown_kind(tmp_path: Path) -> None:
    cache = filled()
    cache.layers[2].more = object()
    with pytest.raises(ValueError, match="layer 2, a DynamicLayer, cannot be saved: more is a object"):
        cache.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_may_end_in_a_draft(tmp_path: Path) -> None:
    """Both sides take their statistics together, though nothing is packed yet."""
    sides = {side: {"method": "turboquant", "bits": 3.5} for side in ("keys", "values")}
    saved = CompressedCache(small_config(), {**sides, "sink_tokens": 4, "recent_tokens": 8})
    saved.activate_past_recording()
    x = torch.randn(1, HEADS, 140, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        saved.update(x, x, layer)
    assert saved.packed_tokens == 0
    saved.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", small_config())
    loaded.activate_past_recording()
    for cache in (saved, loaded):
        for layer in range(2):
            cache.update(x, x, layer)
    assert saved.packed_tokens > 0
    assert torch.equal(loaded.layers[1].keys, saved.layers[1].keys)
