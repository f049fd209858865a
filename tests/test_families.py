"""Model families, tiny and random: fused and not fused give the same logits over packed tokens."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.layer import CompressedLayer

TURBOQUANT: dict[str, Any] = {
    "keys": {"method": "turboquant", "bits": 4},
    "values": {"method": "turboquant", "bits": 4},
    "sink_tokens": 4,
    "recent_tokens": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": None},
    "phi3": {"partial_rotary_factor": 0.5},
    "granite": {"attention_multiplier": 0.3},
    "olmo2": {},
    "cohere2": {"sliding_window": 16, "num_hidden_layers": 4},
    "gpt_neox": {"hidden_size": 128, "num_key_value_heads": 4},
    "gemma2": {"attn_implementation": "eager", "attn_logit_softcapping": 2.0, "head_dim": 32, "sliding_window": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 16, "num_hidden_layers": 6},
    "gpt_oss": {"attn_implementation": "eager", "head_dim": 32, "num_local_experts": 4, "sliding_window": 16},
}


def make(family: str) -> PreTrainedModel:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.1,
    }
    options = {**sizes, **FAMILIES[family]}
    attention = options.pop("attn_implementation", "sdpa")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), attn_implementation=attention)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.float().eval()


@torch.no_grad()
def logits(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A left-padded prompt, single steps, one of five tokens, a chunk, and one step more."""
    parts = []
    for part in ids.split([60, 1, 1, 5, 20, 1], 1):
        seen = mask[:, : cache.get_seq_length() + part.shape[1]]
        positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -part.shape[1] :]
        output = model(input_ids=part, past_key_values=cache, attention_mask=seen, position_ids=positions)
        parts.append(output.logits)
    return torch.cat(parts, 1)[mask.bool()]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_equals_not_fused(family: str) -> None:
    """Over full-attention layers; sliding ones stay as they were. Soft-capping and attention sinks are honoured."""
    model = make(family)
    previous = model.config._attn_implementation
    ids = torch.randint(1, 64, (2, 88), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    results = []
    for fused in (False, True):
        (enable_fused_attention if fused else disable_fused_attention)(model)
        cache = CompressedCache(model.config, TURBOQUANT)
        results.append(logits(model, cache, ids, mask))
        assert cache.packed_tokens > 0
        kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
        assert [isinstance(layer, CompressedLayer) for layer in cache.layers] == [k == "full_attention" for k in kinds]
    torch.testing.assert_close(*results, atol=1e-4, rtol=0)
    disable_fused_attention(model)
    assert model.config._attn_implementation == previous
    dense = {"keys": "none", "values": "none"}
    exact = logits(model, CompressedCache(model.config, dense), ids, mask)
    assert (results[0] - exact).abs().max() > 1e-3, "compression has an effect at all"


def test_softcap_and_sinks_matter() -> None:
    """The control for the two options above: without them these models' logits are others."""
    ids = torch.randint(1, 64, (1, 88), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    model = make("gemma2")
    enable_fused_attention(model)
    with_cap = logits(model, CompressedCache(model.config, TURBOQUANT), ids, mask)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    without = logits(model, CompressedCache(model.config, TURBOQUANT), ids, mask)
    assert (with_cap - without)[60:62].abs().max() > 1e-2
    model = make("gpt_oss")
    enable_fused_attention(model)
    with_sinks = logits(model, CompressedCache(model.config, TURBOQUANT), ids, mask)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    without = logits(model, CompressedCache(model.config, TURBOQUANT), ids, mask)
    assert (with_sinks - without)[60:62].abs().max() > 1e-2


def test_composite_config() -> None:
    """A multimodal model: only its decoder is switched, and put back."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**make("gemma3_text").config.to_dict(), "model_type": "gemma3_text"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 60, (2, 60), generator=torch.Generator().manual_seed(1))
    before = (model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation)
    outputs = []
    for fused in (False, True):
        (enable_fused_attention if fused else disable_fused_attention)(model)
        cache = CompressedCache(model.config, TURBOQUANT)
        outputs.append(model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False))
        assert cache.packed_tokens > 0
    assert model.config.vision_config._attn_implementation == before[1]
    assert torch.equal(*outputs)
    disable_fused_attention(model)
    assert (model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation) == before
