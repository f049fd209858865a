"""Rules of every method: what is packed, attended to and refused; ways of `generate`, fused and unfused."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.oracle import label
from support.recorded_paths import record_paths

from kvcache_compress import disable_fused_attention, enable_fused_attention


def test_path_is_taken(case: Any, ids: torch.Tensor) -> None:
    """Fused attention runs at decode steps over packed tokens, once per compressed layer.

    C++ attention runs prompt chunks too, and tiles run them if the value codec's `chunks_on_cpp` is False.
    """
    cache = case.cache()
    taken = []
    for part in (ids[:, :60], ids[:, 60:90], ids[:, 90:91], ids[:, 91:97]):
        with record_paths() as paths:
            case.feed(cache, part)
        taken.append(paths)
    layers = cache.compressed_layers.values()
    backends = [layer.backend.name for layer in layers]
    chunks = ["cpp" if layer.sides["values"].codec.chunks_on_cpp else "tiled" for layer in layers]
    fused_chunks = [path for path, backend in zip(chunks, backends, strict=True) if backend == "cpp"]
    assert taken[0] == []
    assert [call for call in taken[1] if call.path != "decode"] == [(path, 30) for path in fused_chunks] * case.fused
    assert taken[2] == [(backend, 1) for backend in backends] * case.fused
    assert taken[3] == [(backend, 6) for backend in backends] * case.fused


def test_positive_crop_means_what_it_means_to_transformers(unfused: Any, ids: torch.Tensor) -> None:
    """A length where Transformers takes it for one, else an error that says what to write, and no change."""
    cache, oracle = unfused.cache(), unfused.oracle()
    with torch.no_grad():
        for one in (cache, oracle):
            unfused.feed(one, ids[:, :75])
    before = [layer.keys.clone() for layer in cache.layers]
    try:
        oracle.crop(60)
    except ValueError:
        with pytest.raises(ValueError, match=r"crop\(60 - cache.get_seq_length\(\)\)"):
            cache.crop(60)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    assert cache.packed_tokens > 0
    assert cache.get_seq_length() == oracle.get_seq_length()


@pytest.mark.parametrize("case", [("spectral-prefill", True)], indirect=True, ids=label)
def test_a_crop_before_attention_takes_back_what_was_due(case: Any) -> None:
    """A crop after a forward that failed between a layer's update and its attention."""
    x = torch.randn(2, 2, 60, 32, generator=torch.Generator().manual_seed(0))
    cache = case.cache()
    cache.update(x, x, 0)
    layer = cache.layers[0]
    assert layer.awaits_queries
    layer.crop(-50)
    layer.close(None)
    assert layer.packed_tokens == 0
    assert torch.equal(layer.keys, x[:, :, :10])


WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_fused_equals_not_fused(unfused: Any, ids: torch.Tensor, way: str, capacity: int | None) -> None:
    """Static caches give the tokens of growing ones."""
    outputs = []
    for fused, room in ((False, None), (True, capacity)):
        (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
        cache = unfused.cache(max_cache_len=room)
        torch.manual_seed(3)
        how = {**with_cache(cache), "max_new_tokens": 28, "disable_compile": True, **WAYS[way]}
        outputs.append(unfused.model.generate(ids[:, :50], **how))
        assert cache.packed_tokens >= 32
    assert outputs[0].shape[1] == 78
    assert torch.equal(*outputs)
