"""Read a decoder's shape from a model's config: cache layers, layer types and head sizes."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_UNUSABLE = {
    "blip": "its layers mix keys and values of the image with those of the text in any cache but DynamicCache",
    "minimax": "it takes no cache but its own MiniMaxCache",
    "openai-gpt": "it takes no cache",
    "reformer": "it keeps hash buckets of its own and puts nothing into a cache",
    "vibevoice": "it writes into cached keys and values",
    "xlnet": "it keeps a memory of its own (mems) and puts nothing into a cache",
}
"""Models that would ignore a compressed cache, fail with it, or attend to the wrong tokens."""

# Transformers' caches are imported in functions, because the import takes seconds and some commands don't need it.


@functools.cache
def cache_argument() -> str:
    """Name of the cache argument of models and of `generate`.

    It is `cache` from Transformers 5.24 on, which still accepts `past_key_values` with a warning.
    """
    from transformers import GenerationMixin

    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in known else "past_key_values"


def is_full_attention(layer: Any) -> bool:
    """True if this Transformers cache layer holds all keys and values of a sequence, even beside a recurrent state."""
    from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, StaticLayer

    return type(layer) in (DynamicLayer, StaticLayer, LinearAttentionAndFullAttentionLayer)


def decoder_layers(
    model_config: PreTrainedConfig, max_cache_len: int | None = None
) -> tuple[PreTrainedConfig, list[Any]]:
    """Return the decoder's config and its Transformers cache layers, growing or (`max_cache_len`) static."""
    from transformers import PreTrainedConfig
    from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticLayer

    if not isinstance(model_config, PreTrainedConfig):
        raise ValueError(f"config must be a model's config, such as model.config (got {type(model_config).__name__})")
    if getattr(model_config, "is_encoder_decoder", False):
        raise ValueError(
            f"{model_config.model_type} is an encoder-decoder model; only decoder-only models are supported"
        )
    decoder = model_config.get_text_config(decoder=True)
    if model_config.model_type in _UNUSABLE:
        raise ValueError(
            f"{model_config.model_type} cannot use a compressed cache: {_UNUSABLE[model_config.model_type]}"
        )
    if not hasattr(decoder, "num_hidden_layers"):
        raise ValueError(
            f"{model_config.model_type} has no decoder whose cache could be compressed (its config has no "
            "num_hidden_layers)"
        )
    plain = DynamicCache(config=decoder) if max_cache_len is None else StaticCache(decoder, max_cache_len)
    layers = list(plain.layers)
    window, positions = (getattr(decoder, name, None) or 0 for name in ("sliding_window", "max_position_embeddings"))
    if window >= positions > 0 and all(plain.is_sliding):  # as of Phi 3.5: they hide nothing
        full = DynamicLayer if max_cache_len is None else functools.partial(StaticLayer, max_cache_len)
        layers = [full() for _ in layers]
    heads = getattr(_full_attention_config(decoder), "num_attention_heads", None)
    attends = bool(heads) and "mamba" not in decoder.model_type
    if not attends or not any(is_full_attention(layer) for layer in layers):
        found = ", ".join(sorted(set(layer_types(decoder, layers)))) if attends else "no attention at all"
        raise ValueError(f"{model_config.model_type} has no full-attention layer to compress (it has {found})")
    return decoder, layers


def head_dim_of(config: PreTrainedConfig) -> int:
    """Head dimension of keys in full-attention layers."""
    config = _full_attention_config(config)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads_of(config: PreTrainedConfig) -> int:
    """Number of key/value heads in full-attention layers."""
    config = _full_attention_config(config)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _full_attention_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Config of the first full-attention layer (or the first layer), if layers have configs of their own."""
    kinds = getattr(config, "layer_types", None) or []
    if kinds and hasattr(config, "per_layer_config"):
        return config.per_layer_config[kinds.index("full_attention") if "full_attention" in kinds else 0]
    return config


def layer_types(config: PreTrainedConfig, layers: list[Any]) -> list[str]:
    """Attention type of each layer, from the config if it names them, else from the cache layers."""
    named = getattr(config, "layer_types", None)
    if named is not None and len(named) == len(layers):
        return list(named)
    return [_layer_type(layer) for layer in layers]


def _layer_type(layer: Any) -> str:
    if is_full_attention(layer):
        return "full_attention"
    return "sliding_attention" if getattr(layer, "is_sliding", False) else type(layer).__name__
