"""Measured sizes of filled caches: the same in models of any type, and for peers those of their layouts."""

import importlib.util
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import method_config, small_model
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches.caches import CacheSpec, Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache, grouped_cache, stored_bytes
from kvcache_compress.eval.caches.resolve import resolve_cache

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
def filled(model: LlamaForCausalLM, spec: CacheSpec, *sizes: int) -> Measured:
    """Measure a cache after passes of this many tokens."""
    cache = spec.make(model)
    for size in sizes:
        model(input_ids=torch.arange(size)[None] * 7 % 64, **with_cache(cache))
    return spec.measure(cache)


def measured(spec: CacheSpec, dtype: torch.dtype) -> Measured:
    """Measure a cache after a prompt and nine steps, so that windows and buffers are partly filled."""
    return filled(small_model().to(dtype), spec, 150, *[1] * 9)


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


TOKENS = 96
NUMBERS = 2 * 2 * 2 * TOKENS * 64  # layers, sides, heads, tokens, head dimension


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(head_dim=64)


def test_fp8_is_8_bits_and_a_scale_per_side(model: LlamaForCausalLM) -> None:
    found = filled(model, fp8_cache(), TOKENS)
    assert found.packed_tokens == TOKENS
    assert found.total_bytes == NUMBERS + 2 * 4  # four scales
    assert found.packed_bits == found.all_bits == pytest.approx(8, abs=0.01)


@needs_hqq
@pytest.mark.parametrize(("bits", "group_size"), [(2, 64), (4, 32)])
def test_hqq_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM, bits: int, group_size: int) -> None:
    found = filled(model, grouped_cache("hqq", bits, group_size=group_size), TOKENS)
    expected = bits + 32 / group_size
    assert found == Measured(TOKENS, expected, expected, int(NUMBERS * expected / 8))


@needs_hqq
def test_dense_residual_counts_in_all_bits_alone(model: LlamaForCausalLM) -> None:
    found = filled(model, grouped_cache("hqq", 4), TOKENS, TOKENS // 3)
    assert (found.packed_tokens, found.packed_bits) == (TOKENS, 4.5)
    assert found.all_bits == pytest.approx((3 * 4.5 + 16) / 4)
    assert found.total_bytes == NUMBERS * 4.5 / 8 + 2 * NUMBERS / 3


@needs_hqq
def test_residual_is_packed_when_full(model: LlamaForCausalLM) -> None:
    spec = resolve_cache("hqq-4@residual=32")
    assert spec.name == "hqq-4@residual=32"
    found = filled(model, spec, TOKENS, 32)
    assert (found.packed_tokens, found.all_bits) == (TOKENS + 32, 4.5)


@pytest.mark.slow  # quanto compiles an extension on its first use
@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-quanto is not installed")
def test_quanto_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM) -> None:
    assert filled(model, grouped_cache("quanto", 4), TOKENS) == Measured(TOKENS, 4.5, 4.5, int(NUMBERS * 4.5 / 8))


def test_a_storage_counts_once() -> None:
    codes = torch.zeros(10, dtype=torch.uint8)
    scale = torch.zeros(3, dtype=torch.float32)
    assert stored_bytes((codes, {"again": codes.view(2, 5), "scales": [scale, scale[1:]], "group": 64})) == 10 + 6
