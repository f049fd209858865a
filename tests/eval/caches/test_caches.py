"""Caches under test: one prefill for all continues as after an own one; sizes are the same in models of any type."""

import importlib.util
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from outlier_model import with_outlier_channels
from support.cache_name import with_cache
from support.models import family_cases
from support.models.small_model import METHODS, method_config, small_model
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec, Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache, grouped_cache, stored_bytes
from kvcache_compress.eval.caches.prefill import prefill

IDS = torch.arange(150)[None] * 7 % 64
MORE = torch.arange(90) * 5 % 64


def specs() -> list[CacheSpec]:
    return [full_cache(), fp8_cache(), *(preset_cache(method_config(name), name=name) for name in METHODS)]


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
@torch.inference_mode()
def test_forced_logits_are_those_of_an_own_prefill(spec: CacheSpec) -> None:
    model = small_model()
    run = prefill(model, IDS).run(spec)
    cache = spec.make(model)
    logits = [model(input_ids=IDS, **with_cache(cache), logits_to_keep=1).logits[0]]
    assert run.measured == spec.measure(cache)
    assert (run.measured.packed_tokens > 0) != spec.lossless
    for part in MORE[None].split(16, 1):
        logits.append(model(input_ids=part, **with_cache(cache)).logits[0])
    assert torch.equal(run.forced(MORE, 16), torch.cat(logits))


OUTLIERS = [
    {"method": "turboquant", "bits": 2},
    {"method": "qjl"},
    {"method": "polarquant_recursive", "radius_bits": 8},
]


@pytest.mark.parametrize("keys", [{"method": "spectral", "bits": 3}, *OUTLIERS], ids=lambda keys: keys["method"])
def test_a_cache_that_needs_queries_sees_those_of_the_prompt(keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Statistics are those of the model's own fused prefill, which the model is free of afterwards."""
    model = with_outlier_channels(small_model()) if keys in OUTLIERS else small_model()
    spec = preset_cache({"keys": keys, "values": "none", "sink_tokens": 4, "recent_tokens": 8}, name="ours")
    prompt = IDS.repeat(1, 3) if keys in OUTLIERS else IDS
    found = prefill(model, prompt).run(spec).cache
    assert model.config._attn_implementation == "sdpa"
    assert "queries of the first prompt were not seen" not in caplog.text
    enable_fused_attention(model)
    own = spec.make(model)
    with torch.no_grad():
        model(input_ids=prompt, **with_cache(own))
    assert ("factors" in own.layers[0].sides["keys"].codec.statistics) == (keys in OUTLIERS)
    for ours, theirs in zip(found.layers, own.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


@pytest.mark.parametrize(("name", "fused"), [("full", False), ("turboquant", False), ("commvq", True)])
def test_generation_is_that_of_generate(name: str, fused: bool) -> None:
    """90 tokens pack the recent window several times, and reuse tokens that were decoded once."""
    model = small_model()
    if fused:
        enable_fused_attention(model)
    spec = next(spec for spec in specs() if spec.name == name)
    how = {"max_new_tokens": 90, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(IDS, attention_mask=torch.ones_like(IDS), **with_cache(spec.make(model)), **how)
    assert torch.equal(prefill(model, IDS).run(spec).generate(90), expected[0, IDS.shape[1] :])
    assert torch.equal(prefill(model, IDS).run(spec).generate(1), expected[0, IDS.shape[1] : IDS.shape[1] + 1])


def test_generation_from_logits_that_are_not_finite_is_refused() -> None:
    class Broken(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            new = values if self.get_seq_length(layer_idx) < IDS.shape[1] + 3 else values * torch.nan
            return super().update(keys, new, layer_idx, *args, **kwargs)

    spec = replace(full_cache(), make=lambda model: Broken(config=model.config))
    with pytest.raises(ValueError, match="'full': the model's logits are not finite"):
        prefill(small_model(), IDS).run(spec).generate(9)


def test_generation_ends_at_an_end_token() -> None:
    model = small_model()
    free = prefill(model, IDS).run(full_cache()).generate(40).tolist()
    for end in (free[0], free[-1]):
        assert prefill(model, IDS).run(full_cache()).generate(40, [end, 99]).tolist() == free[: free.index(end) + 1]
    assert prefill(model, IDS).run(full_cache()).generate(5, [free[0]], 1).tolist()[0] != free[0]


@torch.inference_mode()
def test_a_run_is_good_for_one_continuation_and_leaves_nothing() -> None:
    spec = preset_cache(method_config("turboquant"), name="turboquant")
    run = prefill(small_model(), IDS).run(spec)
    before = run.seconds
    run.forced(MORE[:3])
    assert run.seconds > before
    with pytest.raises(ValueError, match="cache='turboquant'"):
        run.forced(MORE[:3])
    held = weakref.ref(run.cache.layers[0].sides["keys"])
    del run
    assert held() is None, "decoded tokens do not wait for the garbage collection"


@torch.inference_mode()
def test_models_with_sliding_layers_prefill_each_cache() -> None:
    model = family_cases.build("gemma3")
    shared = prefill(model, IDS)
    assert shared.states is None
    run = shared.run(full_cache())
    cache = DynamicCache(config=model.config)
    expected = [model(input_ids=part, **with_cache(cache)).logits[0] for part in (IDS, MORE[None, :16])]
    expected = torch.cat([expected[0][-1:], expected[1]])
    torch.testing.assert_close(run.forced(MORE[:16], 16), expected, atol=1e-4, rtol=0)


def test_more_tokens_than_positions_are_refused() -> None:
    shared = prefill(small_model(max_position_embeddings=160), IDS)
    with pytest.raises(ValueError, match="have 240 tokens, but the model only 160 positions"):
        shared.run(full_cache()).forced(MORE)
    with pytest.raises(ValueError, match="have 161 tokens"):
        shared.run(full_cache()).generate(11)


def test_generation_is_plainly_greedy() -> None:
    """A repetition penalty in the model's own generation config is ignored from the first token on."""
    model = small_model()
    plain = prefill(model, IDS).run(full_cache()).generate(20)
    model.generation_config = GenerationConfig(repetition_penalty=1.8, pad_token_id=0)
    assert torch.equal(plain, prefill(model, IDS).run(full_cache()).generate(20))


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
@pytest.mark.parametrize("bits", [2, 4])
def test_hqq_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM, bits: int) -> None:
    found = filled(model, grouped_cache("hqq", bits), TOKENS)
    expected = bits + 32 / 64
    assert found == Measured(TOKENS, expected, expected, int(NUMBERS * expected / 8))


@needs_hqq
def test_dense_residual_counts_in_all_bits_alone(model: LlamaForCausalLM) -> None:
    found = filled(model, grouped_cache("hqq", 4), TOKENS, TOKENS // 3)
    assert (found.packed_tokens, found.packed_bits) == (TOKENS, 4.5)
    assert found.all_bits == pytest.approx((3 * 4.5 + 16) / 4)
    assert found.total_bytes == NUMBERS * 4.5 / 8 + 2 * NUMBERS / 3


@pytest.mark.slow  # quanto compiles an extension on its first use
@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-quanto is not installed")
def test_quanto_is_its_codes_and_two_16_bit_numbers_per_group(model: LlamaForCausalLM) -> None:
    assert filled(model, grouped_cache("quanto", 4), TOKENS) == Measured(TOKENS, 4.5, 4.5, int(NUMBERS * 4.5 / 8))


def test_a_storage_counts_once() -> None:
    codes = torch.zeros(10, dtype=torch.uint8)
    scale = torch.zeros(3, dtype=torch.float32)
    assert stored_bytes((codes, {"again": codes.view(2, 5), "scales": [scale, scale[1:]], "group": 64})) == 10 + 6
