"""Estimate a cache's size from its config and the model's shape; byte counts come from `codecs/layout.py`."""

import functools
import math
from importlib.resources import files
from os.path import isdir
from pathlib import Path
from typing import NamedTuple

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token, group_tokens
from kvcache_compress.config import CompressionConfig, LayerPlan, SideConfig
from kvcache_compress.modeling.decoder import decoder_layers, head_dim_of, is_full_attention, kv_heads_of
from kvcache_compress.modeling.hub import from_cache_or_hub
from kvcache_compress.storage.packed_store import grown_capacity, tail_capacity
from kvcache_compress.storage.shared.rope_track import DTYPE as ROPE_DTYPE
from kvcache_compress.storage.shared.rope_track import rope_rows
from kvcache_compress.storage.side import FLUSH_TOKENS, Windows
from kvcache_compress.validation import one_line, quoted

BF16_BYTES = 2


def _rope_groups(config: CompressionConfig, head_dim: int, layers: int) -> set[tuple[int, int]]:
    found = {plan.rope_groups(head_dim) for plan in config.plan(["full_attention"] * layers)}
    return {groups for groups in found if groups is not None}


def rope_bytes(config: CompressionConfig, head_dim: int, layers: int, tokens: int) -> int:
    """Bytes of the cos and sin that some methods store, for one sequence; assumes fully rotary heads."""
    rows = sum(rope_rows(tokens, *groups) for groups in _rope_groups(config, head_dim, layers))
    return head_dim * ROPE_DTYPE.itemsize * rows


def constant_bytes(config: CompressionConfig, layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of all layers that do not depend on the number of tokens: rotations, codebooks, tables."""
    plans = (plan for plan in config.plan(["full_attention"] * layers) if plan.compresses)
    sides = ((side, plan.side(side).model_dump_json()) for plan in plans for side in SIDES)
    return sum(_constant_size(side, chosen, head_dim, kv_heads) for side, chosen in sides)


@functools.cache
def _constant_size(side: Side, chosen: str, head_dim: int, kv_heads: int) -> int:
    """`Codec.constant_size` of a side's config in JSON; it takes seconds, as codecs are built for it."""
    config = SideConfig.model_validate_json(chosen)
    return config.codec().constant_size(config.options(), side, head_dim, kv_heads)


def packed_bits(config: CompressionConfig, head_dim: int, layers: int = 32, kv_heads: int = 8) -> float:
    """Stored bits per packed number of the compressed layers, including the cos and sin that they share."""
    plans = [plan for plan in config.plan(["full_attention"] * layers) if plan.compresses]
    factors = head_dim * ROPE_DTYPE.itemsize * sum(1 / size for _, size in _rope_groups(config, head_dim, layers))
    layouts = (plan.layout(side, head_dim) for plan in plans for side in SIDES)
    stored = kv_heads * sum(map(bytes_per_token, layouts)) + factors
    return 8 * stored / (2 * head_dim * kv_heads * len(plans))


def windows_of(plan: LayerPlan, head_dim: int) -> Windows:
    """Windows of a growing layer, with the numbers of tokens that it packs together."""
    group = math.lcm(*(group_tokens(plan.layout(side, head_dim)) for side in SIDES))
    return Windows(plan.sink_tokens, plan.recent_tokens, math.lcm(FLUSH_TOKENS, group), group)


def cache_bytes(
    config: CompressionConfig, layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int = 1
) -> float:
    """Bytes that a growing cache of a bfloat16 model holds for tokens after a prompt of `tokens` per sequence.

    Excludes `rope_bytes` and `constant_bytes`; see `total_bytes`. Methods with statistics pack nothing of prompts that
    are too short to measure, which does not count here. `layers` are those with full attention.
    """
    total = 0.0
    for plan in config.plan(["full_attention"] * layers):
        held: float = 2 * tokens * head_dim * BF16_BYTES
        if plan.compresses:
            windows, sinks = windows_of(plan, head_dim), min(tokens, plan.sink_tokens)
            packed = windows.leaving(tokens - sinks)
            dense = sinks + tail_capacity(tokens - sinks - packed, windows.recent + windows.flush)
            held = 2 * dense * head_dim * BF16_BYTES
            for layout in (plan.layout(side, head_dim) for side in SIDES):
                held += grown_capacity(packed, group_tokens(layout)) * bytes_per_token(layout)
        total += batch * kv_heads * held
    return total


def total_bytes(
    config: CompressionConfig, layers: int, kv_heads: int, head_dim: int, tokens: int, batch: int = 1
) -> float:
    """Bytes of the complete cache: `cache_bytes`, `rope_bytes` of all sequences and `constant_bytes`."""
    shared = batch * rope_bytes(config, head_dim, layers, tokens)
    held = constant_bytes(config, layers, kv_heads, head_dim)
    return cache_bytes(config, layers, kv_heads, head_dim, tokens, batch) + shared + held


class ModelShape(NamedTuple):
    """Sizes that a cache depends on; `layers` counts full-attention layers only."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "llama-3.1-8b": ModelShape(32, 32, 8, 128),
    "qwen2.5-7b": ModelShape(28, 28, 4, 128),
    "smollm2-135m": ModelShape(30, 9, 3, 64),
}
"""Shapes of well-known models, for estimates without their configs."""


def model_shape(model: str) -> ModelShape:
    """Shape of a model: one of `MODELS` by name, or from the config of a hub id or a folder."""
    if model in MODELS:
        return MODELS[model]
    from transformers import AutoConfig

    try:
        if isdir(Path(model).expanduser()):
            found = AutoConfig.from_pretrained(Path(model).expanduser())
        else:
            found = from_cache_or_hub(model, lambda local: AutoConfig.from_pretrained(model, local_files_only=local))
    except ValueError:
        raise
    except OSError as error:
        raise ValueError(
            f"model={quoted(model)}: not found. Pass {', '.join(MODELS)}, a folder with a saved model, or a model's id "
            f"on the hub ({' '.join(str(error).split())})"
        ) from error
    except Exception as error:  # Transformers raises exceptions of many types for a damaged config
        raise ValueError(f"model={quoted(model)}: its config cannot be read: {one_line(error)}") from error
    config, layers = decoder_layers(found)
    count = sum(is_full_attention(layer) for layer in layers)
    return ModelShape(count, config.num_attention_heads, kv_heads_of(config), head_dim_of(config))


def summary(preset: str) -> str:
    """First sentence of a preset's leading comment."""
    text = (files("kvcache_compress.configs") / f"{preset}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return comment.split(". ")[0].rstrip(".")
