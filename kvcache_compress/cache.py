"""`CompressedCache`: a `transformers.Cache` whose full-attention layers are compressed as a config says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .backend import check_backend
from .codec import Side
from .config import CompressionConfig, LayerPlan, load_config
from .layer import CompressedLayer
from .report import MemoryReport, memory_report
from .rope import RopeLayout, RopeTrack, layer_has_rope, rope_layout

SIDES: tuple[Side, ...] = ("keys", "values")


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
        self.decoder_config, layers = decoder_layers(model_config)
        plans = self.config.plan(_layer_types(self.decoder_config, layers))
        chosen = {
            index: plans[index]
            for index, layer in enumerate(layers)
            if type(layer) is DynamicLayer and plans[index].compresses
        }
        rope = _check_plans(chosen, self.decoder_config)
        self.rope_track = None
        if rope and any(plan.rope_use(side) == "factors" for plan in chosen.values() for side in SIDES):
            self.rope_track = RopeTrack(self.decoder_config, rope)
        for index, plan in chosen.items():
            track = self.rope_track if "factors" in (plan.rope_use("keys"), plan.rope_use("values")) else None
            leads = track is not None and not any(getattr(layer, "track", None) for layer in layers[:index])
            layers[index] = CompressedLayer(index, plan, self.config, self.decoder_config, rope, track, leads)
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
        return memory_report(self.layers, self.rope_track)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if self.rope_track is not None:
            self.rope_track.truncate(max((layer.get_seq_length() for layer in self._tracked()), default=0))

    def reset(self) -> None:
        super().reset()
        if self.rope_track is not None:
            self.rope_track.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._apply_to_track(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._apply_to_track(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._apply_to_track(lambda x: x[indices.to(x.device) if isinstance(indices, torch.Tensor) else indices])

    def _tracked(self) -> list[CompressedLayer]:
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer) and layer.track is not None]

    def _apply_to_track(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.rope_track is not None:
            self.rope_track.apply(change)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A copy that shares the model's config, where fused attention is switched on and off."""
        memo[id(self.decoder_config)] = self.decoder_config
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return twin


def decoder_layers(model_config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[Any]]:
    """The decoder's config and the cache layers that Transformers gives it; `DynamicLayer`s can be compressed.

    Raises:
        ValueError: encoder-decoder models, and models without full attention.
    """
    if not isinstance(model_config, PreTrainedConfig):
        raise ValueError(f"model_config={type(model_config).__name__}: a model's config is needed (model.config)")
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(f"{model_config.model_type} is an encoder-decoder model: only decoders can be compressed")
    decoder = model_config.get_text_config(decoder=True)
    layers = list(DynamicCache(config=decoder).layers)
    attends = _has_attention(decoder)
    if not attends or not any(type(layer) is DynamicLayer for layer in layers):
        found = ", ".join(sorted(set(_layer_types(decoder, layers)))) if attends else "no attention at all"
        raise ValueError(f"{model_config.model_type} has no full-attention layer to compress (it has {found})")
    return decoder, layers


def head_dim_of(config: PreTrainedConfig) -> int:
    """Numbers per key of a full-attention layer."""
    kinds = getattr(config, "layer_types", None) or []
    if "full_attention" in kinds and hasattr(config, "per_layer_config"):
        config = config.per_layer_config[kinds.index("full_attention")]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _layer_types(config: PreTrainedConfig, layers: list[Any]) -> list[str]:
    named = getattr(config, "layer_types", None)
    if named is not None and len(named) == len(layers):
        return list(named)
    return ["full_attention" if type(layer) is DynamicLayer else type(layer).__name__ for layer in layers]


def _has_attention(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "num_attention_heads", None)) and "mamba" not in config.model_type


def _check_plans(plans: dict[int, LayerPlan], config: PreTrainedConfig) -> RopeLayout | None:
    """Refuses what a method cannot take, as far as the config tells; returns the model's RoPE where one is needed."""
    head_dim = None
    if getattr(config, "kv_lora_rank", None) is None:
        head_dim = head_dim_of(config)
    uses = {plan.rope_use(side) for plan in plans.values() for side in SIDES}
    rope = rope_layout(config, head_dim) if head_dim and uses - {"none"} else None
    for index, plan in plans.items():
        for side in SIDES:
            chosen = plan.side(side)
            if head_dim is not None:
                chosen.codec().layout(chosen.options(), side, head_dim)
            if plan.rope_use(side) != "none" and (rope is None or not layer_has_rope(config, index)):
                raise ValueError(
                    f"{chosen.method} for {side} needs rotary position embeddings: layer {index} of "
                    f"{config.model_type} has none that is known"
                )
            chosen.codec().check_model(chosen.options(), side, config, index)
    return rope
