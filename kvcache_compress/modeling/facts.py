"""Facts about a model that its files (caches, codebooks, statistics) record, to be compared when they are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvcache_compress.files.model_file import ModelFacts

from .decoder import decoder_layers, head_dim_of, is_full_attention, kv_heads_of
from .rope import layer_has_rope, rope_layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def model_facts(config: PreTrainedConfig) -> ModelFacts:
    """Identity of a model, from the config of its decoder."""
    head_dim, kv_heads, layers = head_shape(config)
    layout = rope_layout(config, head_dim)
    record: dict[str, Any] = {}
    if layout is not None:
        parameters = getattr(config, "rope_parameters", None) or {}
        record = {"parameters": dict(parameters), "order": layout.order, "rotary": layout.rotary}
    return ModelFacts(
        name=config._name_or_path or "", model_type=config.model_type, head_dim=head_dim, kv_heads=kv_heads,
        layers=layers, rope=json.loads(json.dumps(record, default=str)),
    )  # fmt: skip


def head_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(head dimension, key/value heads, layers) of a decoder's config."""
    return head_dim_of(config), kv_heads_of(config), config.num_hidden_layers


def calibrated_layers(config: PreTrainedConfig) -> list[int]:
    """Decoder layers with full attention, and with RoPE if the model has RoPE."""
    _, kinds = decoder_layers(config)
    has_rope = rope_layout(config, head_dim_of(config)) is not None
    full = [i for i, kind in enumerate(kinds) if is_full_attention(kind)]
    layers = [i for i in full if layer_has_rope(config, i)] if has_rope else full
    if not layers:
        with_rope = " with rotary position embeddings" if has_rope else ""
        raise ValueError(f"{config.model_type} has no full-attention layer{with_rope}")
    return layers
