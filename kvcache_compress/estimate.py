"""Sizes that follow from a config and a model's shape alone; the arithmetic is `layout.py`'s."""

from __future__ import annotations

from importlib.resources import files

from transformers import AutoConfig
from transformers.cache_utils import DynamicLayer

from .cache import decoder_layers, head_dim_of
from .config import CompressionConfig, LayerPlan
from .layout import bytes_per_token

BF16_BYTES = 2


def side_bytes(plan: LayerPlan, head_dim: int) -> float:
    """Bytes per packed token of one head, keys and values together."""
    keys = plan.keys.codec().layout(plan.keys.options(), "keys", head_dim)
    values = plan.values.codec().layout(plan.values.options(), "values", head_dim)
    return bytes_per_token(keys) + bytes_per_token(values)


def packed_bits(config: CompressionConfig, head_dim: int, layers: int = 32) -> float:
    """Stored bits per packed number, averaged over the layers that are compressed."""
    plans = [plan for plan in config.plan(["full_attention"] * layers) if plan.compresses]
    return sum(8 * side_bytes(plan, head_dim) / (2 * head_dim) for plan in plans) / len(plans)


def cache_bytes(
    config: CompressionConfig, layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int = 1
) -> float:
    """Bytes of a bfloat16 model's cache with `tokens` tokens per sequence in its `layers` full-attention layers."""
    total = 0.0
    for plan in config.plan(["full_attention"] * layers):
        dense = min(tokens, plan.sink_tokens + plan.recent_tokens) if plan.compresses else tokens
        per_head: float = dense * 2 * head_dim * BF16_BYTES
        if plan.compresses:
            per_head += (tokens - dense) * side_bytes(plan, head_dim)
        total += batch * kv_heads * per_head
    return total


def shape_of(model: str) -> tuple[int, int, int]:
    """(full-attention layers, key/value heads, head dimension) from the config of a hub id or a path.

    Raises:
        ValueError: a model that cannot be compressed.
    """
    config, layers = decoder_layers(AutoConfig.from_pretrained(model))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return sum(type(layer) is DynamicLayer for layer in layers), heads, head_dim_of(config)


def summary(preset: str) -> str:
    """The first sentence of a preset's leading comment."""
    text = (files("kvcache_compress.configs") / f"{preset}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return comment.split(". ")[0].rstrip(".")
