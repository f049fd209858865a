"""Shrink any decoder of Transformers to a tiny random model: its default config, with every size made small.

Sizes are recognized by their names in the config and its sub-configs; `EXCEPTIONS` has what names do not tell.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

FAMILIES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
VOCAB, WORDS, HEADS, HEAD_DIM = 128, 64, 4, 16
WIDTH = HEADS * HEAD_DIM
"""Sizes of the vocabulary and of its part that prompts are made of; special tokens have the numbers above."""
LAYERS = "num_hidden_layers|num_layers|n_layers?|depth|layers|num_blocks|(en|de)coder_layers"
LIMITS = {
    LAYERS: 2,
    r"topk_group|num_nextn_predict_layers": 1,
    r".*(experts?_per_tok(en)?|top_?k|moe_k|top_k_experts|index_topk\w*)|n_group|num_expert_group|.*n_groups": 2,
    r".*num_.*experts|n_routed_experts": 4,
    r".*((n|num)_(\w+_)?heads?|attention_heads)": HEADS,
    r"rotary_dim": HEAD_DIM // 2,
    r".*(head_dim|key_value_dim|d_head|d_kv|dim_head|kv_channels)": HEAD_DIM,
    r".*(hidden_size\w*|d_model|n_embd|embed_dim|embedding_size|projection_dim|output_dim|dim_model|emb_dim)": WIDTH,
    r".*(intermediate_size\w*|ffn_dim|d_ff|d_inner|mlp_dim|dim_ff|dff|n_inner|projection_hidden_dim)": WIDTH,
    r".*_rank|state_size|.*d_state": HEAD_DIM,
    r"(.*_)?vocab_size\w*|codebook_size|num_embeddings|.*size_base|.*group_vocab": VOCAB,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len": 256,
    r"sliding_window\w*|attention_chunk_size|chunk_size|mamba_chunk_size": 16,
    r"patch_size": 14,
    r"base_channels": 32,
    r"(max_)?image_size|resolution": 56,
}
"""Largest value of the config's sizes, by regular expressions for their names."""
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_GLOBAL = {"global_head_dim": 2 * HEAD_DIM}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_SLIDING_MLA = {
    f"swa_{name}": size
    for name, size in {
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": HEAD_DIM, "kv_lora_rank": HEAD_DIM,
        "head_dim": 2 * HEAD_DIM, "qk_nope_head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM,
    }.items()
}  # fmt: skip
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "text_config": {"vocab_size": 3 * VOCAB},
        "audio_config": {"codebook_dim": 64},
        "image_token_offset": VOCAB,
        "audio_token_offset": 2 * VOCAB,
    },
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "blip-2": {"image_token_index": 127},
    "chameleon": {"vocabulary_map": {"<image>": 127}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _DEFAULT_ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _DEFAULT_ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], **_ROUTED}},
    "deepseek_v2": _ROUTED,
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {**_ROUTED, "n_shared_experts": 1},
    "dots3_note": {
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
        "vision_config": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "text_config": _SLIDING_MLA,
    },
    "dots3_note_text": _SLIDING_MLA,
    "emu3": {"vocabulary_map": {"<image>": 127}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"text_config": _GLOBAL},
    "gemma4_text": _GLOBAL,
    "gemma4_unified": {"text_config": _GLOBAL},
    "gemma4_unified_text": _GLOBAL,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next": {"text_config": {"index_topk": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4}},
    "inkling_mm_model": {"vision_config": {"patch_size": 4}},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llava_next": {"image_grid_pinpoints": [[56, 56]]},
    "llava_next_video": {"image_grid_pinpoints": [[56, 56]]},
    "llava_onevision": {"image_grid_pinpoints": [[56, 56]]},
    "longcat_flash": {"num_layers": 1},
    "mamba2": {"head_dim": 32},
    "mistral3": {"text_config": {"sliding_window": 16}},
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1]}},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * WIDTH},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "qwen2_5_omni_thinker": {"vision_start_token_id": 65},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 65},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16], "num_buckets": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "xmod": {"default_language": "en_XX"},
}
"""Values by family, for sizes whose names or whose relation to others the rules do not know."""


def small_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Config of a family whose sizes are small, with one layer of each type and at least two."""
    options = _small(AutoConfig.for_model(family), iter(range(VOCAB - 1, WORDS, -1)))
    return AutoConfig.for_model(family, **_merged(options, {**EXCEPTIONS.get(family, {}), **changes}))


def _merged(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(options)
    for name, value in changes.items():
        merged[name] = _merged(options.get(name, {}), value) if isinstance(value, dict) else value
    return merged


def _small(config: PreTrainedConfig, special: Iterator[int], nested: bool = False) -> dict[str, Any]:
    """Options that make a config small, those of its sub-configs included."""
    options: dict[str, Any] = {}
    values = {field.name: vars(config).get(field.name) for field in fields(config)}
    kept = _kept_layers(config)
    for name, value in values.items():
        if name in config.sub_configs:
            if isinstance(value, PreTrainedConfig):
                options[name] = {"model_type": value.model_type, **_small(value, special, True)}
        elif name == "pad_token_id":
            options[name] = 0
        elif re.fullmatch(r".*_token_(id|index)", name) and value is not None:
            options[name] = next(special)
        elif isinstance(value, (list, tuple)) and kept and len(value) == config.num_hidden_layers:
            options[name] = [value[index] for index in kept]
        elif isinstance(value, (list, tuple)) and re.fullmatch("(image|patch)_size", name):
            options[name] = [min(size, _limit(name) or size) for size in value]
        elif type(value) is int and (limit := _limit(name)) is not None and value > limit:
            options[name] = limit
    if kept:
        options["num_hidden_layers"] = len(kept)
        if "sliding_attention" in config.layer_types:
            options["sliding_window"] = 16
    if "head_dim" in values:
        options["head_dim"] = HEAD_DIM
    if "qk_head_dim" in values:
        options["qk_head_dim"] = 2 * HEAD_DIM
    heads, kv = (values.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if "num_key_value_heads" in values:
        options["num_key_value_heads"] = HEADS if kv in (heads, None) else 1 if kv == 1 else 2
    rope = values.get("rope_parameters") or {}
    if "rope_theta" in rope and (nested or "mrope_section" in rope):
        numbers = options.get("qk_rope_head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1)
        section = _shares(rope.get("mrope_section") or [22, 22, 20], int(numbers) // 2)
        options["rope_parameters"] = {**rope, "mrope_section": section}
    return options


def _shares(section: list[int], total: int) -> list[int]:
    """Share `total` out in the proportions of a section, largest remainders first."""
    exact = [part * total / sum(section) for part in section]
    shares = [int(part) for part in exact]
    for index in sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _kept_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the first layer of each type, two at least; empty if layers have no types."""
    types = getattr(config, "layer_types", None)
    if not types:
        return []
    kept = [types.index(kind) for kind in dict.fromkeys(types)]
    return sorted(kept if len(kept) > 1 else [0, len(types) - 1])


def _limit(name: str) -> int | None:
    return next((limit for pattern, limit in LIMITS.items() if re.fullmatch(pattern, name)), None)


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random model of a small config in float32, for images and text if it takes images."""
    images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    torch.manual_seed(0)
    return kind.from_config(config).float().eval()
