"""Facts about a model that its files (caches, codebooks, statistics) record, to be compared when they are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvcache_compress.files.model_file import ModelFacts

from .decoder import head_dim_of, kv_heads_of
from .rope import rope_layout

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
