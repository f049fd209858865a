"""Models of Transformers, shrunk to tiny random ones: kinds of attention with every method, and single families.

`tests/support/models/support_table.py --check` runs all kinds with all methods, and all families.
"""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.cache_name import with_cache
from support.models import family_cases, family_sweep, shrink
from support.models.family_cases import FAMILIES, METHODS, build, logits, method_config, model, outcome
from support.models.family_sweep import SIX_BITS, verdict
from support.models.shrink import small_config, small_model
from support.paths import ROOT
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.modeling.decoder import head_dim_of
from kvcache_compress.modeling.rope import layer_has_rope, rope_layout, rotary_embedding
from kvcache_compress.storage import view

NEEDS_ROPE = {"polarquant_rope", "commvq"}
WITHOUT_ROPE = {"cohere2", "deepseek_v3", "opt", "gpt2"}
LAYERS_WITHOUT_ROPE = {method: {"smollm3", *WITHOUT_ROPE} for method in NEEDS_ROPE} | {
    "spectral": {"smollm3", "cohere2"}  # whose statistics are those of models with RoPE, or without
}
"""Families whose full-attention layers have no RoPE, or, like deepseek, none in the tensors cached as keys."""
SLIDING_ALONE_ROTATES = ["afmoe", "cohere2_moe", "exaone4", "exaone_moe", "flint"]
"""More families whose full-attention layers have no RoPE, listed in `modeling/rope.py`."""
THEN_SLIDING = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}
FULL_FIRST: dict[str, dict[str, Any]] = {
    "gpt_oss": THEN_SLIDING,
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
    "falcon_h1": {"num_hidden_layers": 1},
    **dict.fromkeys(SLIDING_ALONE_ROTATES, THEN_SLIDING),
}
"""Configs with full attention first: sliding windows and recurrent states would mix positions into later keys."""


PAIRS = [
    ("llama", "commvq"), ("qwen2", "kivi"), ("gemma2", "turboquant"), ("gemma3", "polarquant_rope"),
    ("gemma4", "commvq"), ("phi3", "spectral"), ("phi3, 96", "polarquant_recursive"), ("gpt_oss", "qjl"),
    ("cohere2", "turboquant"), ("cohere2", "spectral"), ("glm4", "polarquant_rope"), ("qwen3_next", "commvq"),
    ("falcon_h1", "spectral"), ("deepseek_v3", "turboquant"), ("deepseek_v3", "spectral"), ("smollm3", "commvq"),
    ("gpt_neox", "commvq"), ("opt", "polarquant_recursive"), ("gpt2", "qjl"), ("gpt2", "polarquant_rope"),
]  # fmt: skip
"""Every kind of model and every method; `tests/support/models/support_table.py --check` runs all pairs."""


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_family_with_method(family: str, method: str) -> None:
    """Fused and unfused attention agree for left padding, steps and chunks, or the cache refuses with a reason."""
    found = outcome(family, method)
    kind = FAMILIES[family].kind or family
    if method == "spectral" and family == "deepseek_v3":
        assert found.support == "no"
    elif family in LAYERS_WITHOUT_ROPE.get(method, set()):
        assert found.support == ("rules" if family == "smollm3" else "no")
        layer = 1 if family in ("smollm3", "cohere2") else 0
        assert found.reason == (
            f"{method} for keys needs rotary position embeddings, and none were found in layer {layer} of {kind}"
        )
    else:
        assert found.support == "yes"
    assert found.fused == (found.support != "no" and family != "deepseek_v3")


def test_a_recurrent_state_beside_attention_follows_the_batch(tmp_path: Path) -> None:
    """Batch operations change a recurrent state like the keys; cropping and saving it raise clear errors."""
    cache = CompressedCache(model("falcon_h1").config, method_config("falcon_h1", "turboquant"))
    logits(model("falcon_h1"), cache)
    layer = cache.layers[0]
    before, keys = layer.recurrent_states[0].clone(), layer.keys
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    assert cache.packed_tokens == 64
    torch.testing.assert_close(layer.recurrent_states[0], before[[1, 0]], atol=0, rtol=0)
    torch.testing.assert_close(layer.keys, keys[[1, 0]], atol=0, rtol=0)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="layer 0, a HybridCompressedLayer, cannot be cropped"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="layer 0, with a recurrent state beside its keys and values, cannot be saved"):
        cache.save(tmp_path / "cache.safetensors")
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not layer.recurrent_states[0].any()


@pytest.mark.parametrize("method", METHODS)
def test_a_head_dimension_that_a_method_cannot_take(method: str) -> None:
    odd = build("llama", head_dim=20).config
    CompressedCache(odd, {"keys": "none", "values": "none"})
    with pytest.raises(ValueError, match="head_dim=20 for"):
        CompressedCache(odd, method_config("llama", method))


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_static_layers(family: str) -> None:
    """Static capacity works beside sliding and linear layers, with soft-cap, sinks, wider keys and partial RoPE."""
    built = model(family)
    config = method_config(family, "turboquant")
    static = config.model_copy(update={"max_cache_len": 110})
    for expected, got in zip(
        family_cases.both_ways(built, config)[:2], family_cases.both_ways(built, static)[:2], strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert family_cases.both_ways(built, static).cache.packed_tokens > 0


def spread(keys: torch.Tensor) -> float:
    """Largest deviation of keys `[1, H, T, D]` from their first token's, relative to their largest number."""
    return float((keys - keys[:, :, :1]).abs().max() / keys.abs().max())


@pytest.mark.parametrize("family", [*FAMILIES, *SLIDING_ALONE_ROTATES])
@torch.no_grad()
def test_rope_is_undone_as_the_model_does_it(family: str) -> None:
    """Keys of equal tokens differ by position only, and are equal once `modeling/rope.py` undoes RoPE."""
    if family in SLIDING_ALONE_ROTATES and family not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {family}")
    one = build(family, **FULL_FIRST.get(family, {}))
    layout, embed = rope_layout(one.config, head_dim_of(one.config)), rotary_embedding(one.config)
    assert (layout is None) == (family in {"opt", "gpt2", "deepseek_v3"})
    if layout is None or embed is None:
        return
    cache = DynamicCache(config=one.config)
    one(torch.full((1, 14), 7), **with_cache(cache))
    factors = layout.factors(embed(torch.zeros(1), torch.arange(14)[None]))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and not layer.is_sliding:
            turned = layer_has_rope(one.config, index)
            assert (spread(layer.keys) > 0.05) == turned
            assert spread(layout.unrotate(layer.keys, factors) if turned else layer.keys) < 1e-4


def test_full_attention_whose_rope_parameters_are_none() -> None:
    types = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": None}
    by_type, for_all = (shrink.small_config(name, **family_cases.SIZES) for name in ("gemma3_text", "llama"))
    by_type.rope_parameters = types
    for_all.rope_parameters = {"rope_type": "default", "rope_theta": None}
    for config in (by_type, for_all):
        with pytest.raises(ValueError, match=f"none were found in layer . of {config.model_type}"):
            CompressedCache(config, method_config("llama", "polarquant_rope"))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_next", {"num_beams": 3}),
        ("falcon_h1", {"do_sample": True, "num_return_sequences": 2}),
        ("gemma4", {"num_beams": 3}),
    ],
    ids=["qwen3_next", "falcon_h1", "gemma4"],
)
def test_generate_with_padding(family: str, how: dict[str, Any]) -> None:
    ids, mask = (part[:, :60] for part in family_cases.prompt())
    config = method_config(family, "turboquant")

    def generate(cache: DynamicCache | CompressedCache) -> torch.Tensor:
        torch.manual_seed(0)
        options = {"attention_mask": mask, "max_new_tokens": 24, "pad_token_id": 0, **how}
        return model(family).generate(ids, **with_cache(cache), **options)

    outputs = []
    for fused in (False, True):
        with compress(model(family), config, fused=fused):
            cache = CompressedCache(model(family).config, config)
            outputs.append(generate(cache))
        assert cache.packed_tokens == 64
    assert torch.equal(*outputs)
    wide = CompressedCache(model(family).config, config.model_copy(update={"recent_tokens": 256}))
    plain = DynamicCache(config=model(family).config)
    assert torch.equal(generate(wide), generate(plain)), "nothing is packed: exact"


def test_composite_config() -> None:
    """The part that sees images keeps its attention; `test_verdict` generates with such a model."""
    both = shrink.small_model(shrink.small_config("gemma3"))
    config = both.config
    before = (config.text_config._attn_implementation, config.vision_config._attn_implementation)
    enable_fused_attention(both)
    assert config.text_config._attn_implementation != before[0]
    assert config.vision_config._attn_implementation == before[1]
    disable_fused_attention(both)
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == before


CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
(PINNED,) = re.findall(r"^transformers==(.*)$", CONSTRAINTS, re.MULTILINE)
KINDS = {
    "falcon, alibi": ("unfused", False), "falcon, 3 queries per head": ("unfused", False),
    "llama, 7 queries per head": ("fused", False), "diffllama": ("unfused", False), "llama4": ("fails", False),
    "xlnet": ("refused", False), "gemma3": ("fused", True), "mllama": ("fused", True), "qwen2_5_vl": ("fused", True),
}  # fmt: skip
"""One case of each kind, its verdict, and whether an image was used."""
NO_EFFECT = "fused attention has no effect on "


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Forget the models that earlier tests were warned about."""
    view._warn_once.cache_clear()


pinned = pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"sizes and the page are for {PINNED}")


@pinned
@pytest.mark.parametrize("case", KINDS)
def test_verdict(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without compression logits are exact; 6 bits pack; fused equals unfused; or there is a reason.

    Where fused attention never sees the packed tokens, a message says so, once.
    """
    with caplog.at_level(logging.WARNING, "kvcache_compress"):
        found = verdict(case)
    assert (found.kind, found.images) == KINDS[case]
    assert found.reason or found.kind == "fused"
    assert caplog.text.count(NO_EFFECT) == (found.reason == "transforms cached keys and values before it attends")
    if "queries per head" in case:
        assert f"{found.queries} queries per head" in case


@pinned
@pytest.mark.parametrize("name", ["diffllama", "git"])
def test_without_effect_of_fused_attention_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Attention that repeats, expands or multiplies cached tensors itself decodes them; later blocks say no more."""
    model = small_model(small_config(name))
    inputs = family_sweep.prompt(model)
    for fused in (True, False, True, None):
        with compress(model, SIX_BITS, fused=fused) as block:
            family_sweep.logits(model, inputs, CompressedCache(model.config, SIX_BITS))
            model.generate(**inputs, max_new_tokens=3)
        assert block.last_cache.packed_tokens == 32
    assert caplog.text.count(f"{NO_EFFECT}{model.config.get_text_config(decoder=True).model_type}: its attention") == 1
    assert not [hook for hooks in (model._forward_hooks, model._forward_pre_hooks) for hook in hooks.values()]


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM) -> Any:
    return kind(small_config("llama")).eval()


class Forgetful(LlamaForCausalLM):
    """A model whose `generate` never hands the cache on."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "use_cache": False}


def test_a_cache_that_stays_empty_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(1, 64, (1, 60))
    for kind, messages in ((LlamaForCausalLM, 0), (Forgetful, 1)):
        model = llama(kind)
        with compress(model, SIX_BITS) as block:
            for _ in range(2):
                model.generate(ids, max_new_tokens=2)
        assert (block.last_cache.packed_tokens > 0) == (not messages)
        assert caplog.text.count("nothing was compressed: Forgetful") == messages


@pinned
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xlnet", "keeps a memory of its own"),
        ("reformer", "puts nothing into a cache"),
        ("minimax", "its own MiniMaxCache"),
        ("openai-gpt", "it takes no cache"),
        ("vibevoice", "it writes into cached keys and values"),
        ("blip", "mix keys and values of the image with those of the text"),
        ("blt", "has no decoder whose cache could be compressed"),
        ("pi0", "has no decoder whose cache could be compressed"),
        ("t5", "is an encoder-decoder model"),
        ("mamba", "has no full-attention layer to compress .*no attention at all"),
        ("mistral", "has no full-attention layer to compress .*[sS]liding"),
    ],
)
def test_models_that_cannot_use_the_cache_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*{reason}"):
        CompressedCache(AutoConfig.for_model(name), SIX_BITS)


@pinned
@pytest.mark.parametrize("capacity", [None, 64])
def test_a_window_as_wide_as_the_context_hides_nothing(capacity: int | None) -> None:
    preset = SIX_BITS.changed(max_cache_len=capacity)
    layers = CompressedCache(AutoConfig.for_model("phi3", sliding_window=4096), preset).layers
    assert {type(layer) for layer in layers} == {CompressedLayer}
    with pytest.raises(ValueError, match="phi3 has no full-attention layer to compress"):
        CompressedCache(AutoConfig.for_model("phi3", sliding_window=4095), preset)
