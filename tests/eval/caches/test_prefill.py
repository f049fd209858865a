"""One prefill for all caches: each cache continues exactly as after its own prefill."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from outlier_model import with_outlier_channels
from support.cache_name import with_cache
from support.models import family_cases
from support.models.small_model import METHODS, method_config, small_model
from transformers import DynamicCache, GenerationConfig

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec, full_cache, preset_cache
from kvcache_compress.eval.caches.peers import fp8_cache
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
