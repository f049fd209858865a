"""`CompressedCache`: a `transformers.Cache` whose full-attention layers are compressed as a config says."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .backend import check_backend
from .config import CompressionConfig, LayerPlan, load_config
from .layer import CompressedLayer
from .report import MemoryReport, memory_report


class CompressedCache(Cache):
    """A key/value cache that stores older tokens compressed.

    Args:
        model_config: the model's config. Layers other than full attention (sliding, linear, shared ...) stay
            Transformers' own, as do layers whose two sides are `none`.
        config: methods, windows and per-layer rules, or whatever `load_config` takes.

    Raises:
        ValueError: a config that does not fit the model, encoder-decoder models, models without full attention, a
            head dimension that a method cannot take, or a backend that cannot be had.
    """

    def __init__(self, model_config: PreTrainedConfig, config: CompressionConfig | str | dict[str, Any]) -> None:
        self.config = load_config(config)
        check_backend(self.config.backend)
        if getattr(model_config, "is_encoder_decoder", False):
            raise ValueError(f"{model_config.model_type} is an encoder-decoder model: only decoders can be compressed")
        self.decoder_config = model_config.get_text_config(decoder=True)
        layers = list(DynamicCache(config=self.decoder_config).layers)
        layer_types = _layer_types(self.decoder_config, layers)
        compressible = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not compressible or not _has_attention(self.decoder_config):
            found = (
                ", ".join(sorted(set(layer_types))) if _has_attention(self.decoder_config) else "no attention at all"
            )
            raise ValueError(f"{model_config.model_type} has no full-attention layer to compress (it has {found})")
        plans = self.config.plan(layer_types)
        for index in compressible:
            if plans[index].compresses:
                _check_head_dim(plans[index], self.decoder_config)
                layers[index] = CompressedLayer(index, plans[index], self.config, self.decoder_config)
        super().__init__(layers=layers)

    @classmethod
    def from_config(
        cls, model_config: PreTrainedConfig, config: CompressionConfig | str | dict[str, Any]
    ) -> CompressedCache:
        """A cache for a model from a `CompressionConfig`, a preset's name, a YAML file or a dictionary."""
        return CompressedCache(model_config, config)

    @property
    def packed_tokens(self) -> int:
        """Packed tokens per sequence, the most of any layer."""
        return max((layer.packed_tokens for layer in self.layers if isinstance(layer, CompressedLayer)), default=0)

    def memory_report(self) -> MemoryReport:
        """Bytes and bits of every layer, everything counted; prints as a table."""
        return memory_report(self.layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A copy that shares the model's config, where fused attention is switched on and off."""
        memo[id(self.decoder_config)] = self.decoder_config
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return twin


def _layer_types(config: PreTrainedConfig, layers: list[Any]) -> list[str]:
    named = getattr(config, "layer_types", None)
    if named is not None and len(named) == len(layers):
        return list(named)
    return ["full_attention" if type(layer) is DynamicLayer else type(layer).__name__ for layer in layers]


def _has_attention(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "num_attention_heads", None)) and "mamba" not in config.model_type


def _check_head_dim(plan: LayerPlan, config: PreTrainedConfig) -> None:
    """Refuses a head dimension at construction where the config tells it; else the first update does."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plan.keys.codec().layout(plan.keys.options(), "keys", head_dim)
    plan.values.codec().layout(plan.values.options(), "values", head_dim)
