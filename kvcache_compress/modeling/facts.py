"""Facts of a model that its files (saved caches, codebooks) record, to be compared when they are loaded."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .decoder import head_dim_of, kv_heads_of
from .rope import RopeLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def rope_record(config: PreTrainedConfig, layout: RopeLayout) -> dict[str, Any]:
    """Record of a model's RoPE for a file: the config's parameters and the pairing of channels."""
    parameters = getattr(config, "rope_parameters", None) or {}
    record = {"parameters": dict(parameters), "order": layout.order, "rotary": layout.rotary}
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return plain


def head_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(head dimension, key/value heads, layers) of a decoder's config."""
    return head_dim_of(config), kv_heads_of(config), config.num_hidden_layers


def same_model(one: str, other: str) -> bool:
    """True if two ids or paths may name the same model: their last two parts are equal, or one is empty."""
    parts = [PurePath(name).parts for name in (one, other)]
    count = min(2, *(len(part) for part in parts))
    return count == 0 or parts[0][-count:] == parts[1][-count:]
