"""Configs with rules for single layers."""

from collections.abc import Mapping

import yaml

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, LayerRule, SideConfig

DENSE = SideConfig(method="none")


def compress_only(config: CompressionConfig, layer: int, side: Side, choice: SideConfig) -> CompressionConfig:
    """The config, compressing only one side of one layer."""
    rule = LayerRule.model_validate({"match": [layer], side: choice})
    return config.model_copy(update={"keys": DENSE, "values": DENSE, "layers": [rule]})


def with_choices(config: CompressionConfig, chosen: Mapping[int, Mapping[Side, SideConfig]]) -> CompressionConfig:
    """The config with a rule for each pair of keys and values that differs from its own; equal layers share a rule."""
    groups: list[tuple[dict[str, SideConfig], list[int]]] = []
    for layer, sides in sorted(chosen.items()):
        changed: dict[str, SideConfig] = {
            side: choice for side, choice in sides.items() if choice != getattr(config, side)
        }
        same = next((layers for known, layers in groups if known == changed), None)
        if same is not None:
            same.append(layer)
        elif changed:
            groups.append((changed, [layer]))
    rules = [LayerRule.model_validate({"match": layers, **changed}) for changed, layers in groups]
    return config.model_copy(update={"layers": rules})


def config_yaml(config: CompressionConfig) -> str:
    """The config as a YAML file."""
    fields = {*SIDES, "sink_tokens", "recent_tokens", "layers"}
    content = config.model_dump(mode="json", include=fields, exclude_none=True)
    return yaml.safe_dump(content, default_flow_style=None, sort_keys=False, width=120)
