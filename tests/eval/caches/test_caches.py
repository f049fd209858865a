"""Measured sizes of filled caches do not depend on the type that the model ran in."""

import importlib.util
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import method_config, small_model

from kvcache_compress.eval.caches.caches import CacheSpec, Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache, grouped_cache

IDS = torch.arange(150)[None] * 7 % 64
FOUR_BITS: dict[str, Any] = {"method": "turboquant", "bits": 4}
WINDOWS = {"sink_tokens": 4, "recent_tokens": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: method_config(name) for name in ("turboquant", "kivi", "commvq")},
    "one-side": {"keys": FOUR_BITS, "values": "none", **WINDOWS},
    "one-layer": {"keys": FOUR_BITS, "values": FOUR_BITS, **WINDOWS, "layers": [{"match": 0, "method": "none"}]},
    "full-in-ours": {"keys": "none", "values": "none"},
}
needs_hqq = pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="hqq is not installed")


@torch.inference_mode()
def measured(spec: CacheSpec, dtype: torch.dtype) -> Measured:
    """Measure a cache after a prompt and nine steps, so that windows and buffers are partly filled."""
    model = small_model().to(dtype)
    cache = spec.make(model)
    for part in (IDS, *IDS[:, :9].split(1, 1)):
        model(input_ids=part, **with_cache(cache))
    return spec.measure(cache)


@pytest.mark.parametrize(
    "spec",
    [
        full_cache(),
        fp8_cache(),
        *(preset_cache(config, name=name) for name, config in CONFIGS.items()),
        pytest.param("hqq", marks=needs_hqq),
    ],
    ids=lambda spec: getattr(spec, "name", spec),
)
def test_bits_are_those_beside_a_16_bit_model(spec: Any) -> None:
    """Spare capacity of dense windows counts like their tokens, for every cache."""
    spec = grouped_cache("hqq", 4) if spec == "hqq" else spec
    wide, narrow, half = (measured(spec, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    assert wide == narrow == half
    assert wide.packed_tokens > 0 or spec.name in ("full", "full-in-ours")


def test_dense_tokens_count_16_bits_by_hand() -> None:
    """Layer 0 of `one-layer` is dense: 16 bits for its 159 tokens, whatever type they are stored in."""
    config = CONFIGS["one-layer"]
    alone = measured(preset_cache({**config, "layers": []}, name="both"), torch.float32)
    mixed = measured(preset_cache(config, name="one"), torch.float32)
    numbers = 2 * 2 * 159 * 32  # sides, heads, tokens, head dimension
    assert mixed.total_bytes == alone.total_bytes / 2 + 2 * numbers
    assert mixed.packed_bits == alone.packed_bits == 4.5
    full = measured(full_cache(), torch.float32)
    assert (full.all_bits, full.total_bytes) == (16.0, 2 * 2 * numbers)
    assert measured(preset_cache(CONFIGS["full-in-ours"], name="none"), torch.float32).total_bytes == full.total_bytes
