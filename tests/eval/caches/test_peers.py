"""Peers: measured bits equal those of their layouts."""

import importlib.util

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import small_model
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches import peers
from kvcache_compress.eval.caches.caches import CacheSpec, Measured
from kvcache_compress.eval.caches.peers import PEERS, fp8_cache, grouped_cache, stored_bytes
from kvcache_compress.eval.caches.resolve import resolve_cache

TOKENS = 96
NUMBERS = 2 * 2 * 2 * TOKENS * 64  # layers, sides, heads, tokens, head dimension

needs_hqq = pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="hqq is not installed")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(head_dim=64)


@torch.inference_mode()
def measure(model: LlamaForCausalLM, spec: CacheSpec, *, more: int = 0) -> Measured:
    """Measure a cache after a prompt of `TOKENS` and `more` tokens in a second pass."""
    cache = spec.make(model)
    for count in (TOKENS, more):
        if count:
            model(input_ids=torch.arange(count)[None] % 64, **with_cache(cache))
    return spec.measure(cache)


def test_fp8_is_8_bits_and_a_scale_per_side(model: LlamaForCausalLM) -> None:
    measured = measure(model, fp8_cache())
    assert measured.packed_tokens == TOKENS
    assert measured.total_bytes == NUMBERS + 2 * 4  # four scales
    assert measured.packed_bits == measured.all_bits == pytest.approx(8, abs=0.01)


@needs_hqq
@pytest.mark.parametrize(("bits", "group_size"), [(2, 64), (4, 32)])
def test_hqq_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM, bits: int, group_size: int) -> None:
    measured = measure(model, grouped_cache("hqq", bits, group_size=group_size))
    expected = bits + 32 / group_size
    assert measured == Measured(TOKENS, expected, expected, int(NUMBERS * expected / 8))


@needs_hqq
def test_dense_residual_counts_in_all_bits_alone(model: LlamaForCausalLM) -> None:
    measured = measure(model, grouped_cache("hqq", 4), more=TOKENS // 3)
    assert (measured.packed_tokens, measured.packed_bits) == (TOKENS, 4.5)
    assert measured.all_bits == pytest.approx((3 * 4.5 + 16) / 4)
    assert measured.total_bytes == NUMBERS * 4.5 / 8 + 2 * NUMBERS / 3


@needs_hqq
def test_residual_is_packed_when_full(model: LlamaForCausalLM) -> None:
    spec = resolve_cache("hqq-4@residual=32")
    assert spec.name == "hqq-4@residual=32"
    measured = measure(model, spec, more=32)
    assert (measured.packed_tokens, measured.all_bits) == (TOKENS + 32, 4.5)


@pytest.mark.slow  # quanto compiles an extension on its first use
@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-quanto is not installed")
def test_quanto_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM) -> None:
    assert measure(model, grouped_cache("quanto", 4)) == Measured(TOKENS, 4.5, 4.5, int(NUMBERS * 4.5 / 8))


def test_a_storage_counts_once() -> None:
    codes = torch.zeros(10, dtype=torch.uint8)
    scale = torch.zeros(3, dtype=torch.float32)
    assert stored_bytes((codes, {"again": codes.view(2, 5), "scales": [scale, scale[1:]], "group": 64})) == 10 + 6


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=r'pip install "kvcache-compress\[peers\]"'):
        PEERS["hqq-4"]()
