"""Variants of a config in which single sides of layers are compressed, or left dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml
from transformers import PreTrainedModel

from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, LayerPlan, LayerRule, SideConfig
from kvcache_compress.modeling.decoder import is_full_attention

DENSE = SideConfig(method="none")
Plans = dict[int, LayerPlan]
"""Plans of the full-attention layers by index."""


def plans_of(model: PreTrainedModel, config: CompressionConfig) -> tuple[Plans, dict[str, str]]:
    """Plans of all full-attention layers, and by name why other layers or sides are not compressed.

    Raises:
        ValueError: The config does not fit the model.
    """
    plans: Plans = {}
    skipped: dict[str, str] = {}
    for index, layer in enumerate(CompressedCache(model.config, config).layers):
        if isinstance(layer, CompressedLayer):
            plans[index] = layer.plan
        elif is_full_attention(layer):
            plans[index] = LayerPlan(DENSE, DENSE, config.sink_tokens, config.recent_tokens)
        else:
            skipped[f"layer {index}"] = f"cannot be compressed: {type(layer).__name__} is not full attention"
            continue
        for side in SIDES:
            if plans[index].side(side) == DENSE:
                skipped[f"layer {index}, {side}"] = "the config leaves it dense"
    return plans, skipped


def compress_only(config: CompressionConfig, plan: LayerPlan, layer: int, side: Side) -> CompressionConfig:
    """The config, compressing only one side of one layer, as `plan` says."""
    alone = _with_dense(plan, "keys" if side == "values" else "values")
    bare = config.model_copy(update={"keys": DENSE, "values": DENSE})
    return with_plans(bare, {layer: alone})


def leave_dense(config: CompressionConfig, plans: Plans, sides: Sequence[tuple[int, Side]]) -> CompressionConfig:
    """The config with some sides of layers left dense; its own rules become part of the new ones."""
    changed = dict(plans)
    for layer, side in sides:
        changed[layer] = _with_dense(changed[layer], side)
    return with_plans(config, changed)


def _with_dense(plan: LayerPlan, side: Side) -> LayerPlan:
    return replace(plan, keys=DENSE) if side == "keys" else replace(plan, values=DENSE)


def rules_yaml(config: CompressionConfig) -> str:
    """The config's rules as in a YAML file, one line each."""
    lines = []
    for rule in config.layers:
        text = yaml.safe_dump(rule.model_dump(exclude_none=True), default_flow_style=True, sort_keys=False, width=1000)
        lines.append(f"  - {text}")
    return f"layers:\n{''.join(lines)}"


def with_plans(config: CompressionConfig, plans: Plans) -> CompressionConfig:
    """The config with a rule for each plan that differs from its defaults; layers of equal plans share a rule."""
    default = LayerPlan(config.keys, config.values, config.sink_tokens, config.recent_tokens)
    groups: list[tuple[LayerPlan, list[int]]] = []
    for layer, plan in sorted(plans.items()):
        same = next((layers for known, layers in groups if known == plan), None)
        if same is not None:
            same.append(layer)
        elif plan != default:
            groups.append((plan, [layer]))
    return config.model_copy(update={"layers": [_rule(config, plan, layers) for plan, layers in groups]})


def _rule(config: CompressionConfig, plan: LayerPlan, layers: list[int]) -> LayerRule:
    if not plan.compresses:
        return LayerRule.model_validate({"match": layers, "method": "none"})
    names = ("keys", "values", "sink_tokens", "recent_tokens")
    changed: dict[str, Any] = {name: getattr(plan, name) for name in names}
    changed = {name: value for name, value in changed.items() if value != getattr(config, name)}
    return LayerRule.model_validate({"match": layers, **changed})
