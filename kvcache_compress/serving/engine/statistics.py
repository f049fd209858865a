"""Codecs for all requests of a model, with statistics from one text."""

import logging
import math
from dataclasses import dataclass
from importlib.resources import files

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.config import CompressionConfig
from kvcache_compress.modeling.decoder import cache_argument, is_full_attention, layer_types
from kvcache_compress.storage.backend import Backend
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.side import FLUSH_TOKENS, Windows

from ..prefix_store import PrefixStore

logger = logging.getLogger(__name__)
STATISTICS_TOKENS = 1024
"""Tokens of the built-in text from which statistics are measured."""


@dataclass(frozen=True)
class LayerCodecs:
    """Codecs of a layer, and what they need."""

    codecs: dict[Side, Codec]
    backend: Backend
    track: RopeTrack | None
    heads: int


@dataclass(frozen=True)
class ModelCodecs:
    """Codecs of the model's full-attention layers, by layer, and the windows of all of them."""

    layers: dict[int, LayerCodecs]
    windows: Windows


def built_in_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the built-in text, at most `STATISTICS_TOKENS`."""
    text = (files("kvcache_compress.eval.tasks") / "data" / "default_text.txt").read_text(encoding="utf-8")
    return list(tokenizer(text)["input_ids"][:STATISTICS_TOKENS])


def _tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except Exception as error:  # Transformers raises exceptions of many types
        raise ValueError(
            f"statistics=None: no tokenizer for the built-in text in {model.name_or_path!r} ({type(error).__name__}). "
            "Pass the token ids of about a thousand tokens of text as statistics"
        ) from error


def model_codecs(
    model: PreTrainedModel, compression: CompressionConfig, text: torch.Tensor | None, store: PrefixStore | None
) -> ModelCodecs:
    """Make codecs with the statistics of `text`, token ids `[n]`, or of the built-in text; a store keeps them.

    Raises:
        ValueError: the config has what pages cannot have, its windows differ by layer, or the text is too short.
    """
    for option in ("max_cache_len", "offloading"):
        if getattr(compression, option):
            raise ValueError(f"{option}={getattr(compression, option)!r}: has no meaning for pages; drop it")
    if not compression.quantize_generated:
        raise ValueError("quantize_generated=False: pages hold generated tokens too; drop it")
    text = torch.tensor(built_in_text(_tokenizer_of(model))) if text is None else text

    def measured() -> CompressedCache:
        logger.info("measuring the statistics of %s on %d tokens", model.name_or_path, len(text))
        cache = CompressedCache(model.config, compression)
        with torch.no_grad():
            model(text[None].to(model.device), logits_to_keep=1, **{cache_argument(): cache})
        return cache

    cache = measured() if store is None else store.statistics(model, compression, text, measured)
    plans = compression.plan(layer_types(cache.decoder_config, cache.layers))
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            sides = layer.sides
            if not all(state.prepared for state in sides.values()):
                raise ValueError(f"statistics: {len(text)} tokens are too few; pass about a thousand")
            codecs = {side: state.codec for side, state in sides.items()}
            found[index] = LayerCodecs(codecs, layer.backend, layer.track, sides["keys"].sinks.shape[1])
        elif is_full_attention(layer):
            like: dict[Side, torch.Tensor] = {"keys": layer.keys, "values": layer.values}
            codecs = plans[index].codecs(like, index, compression.seed, None)
            kinds = ((type(codec), codec.options, side) for side, codec in codecs.items())
            backend = resolve_backend(compression.backend, layer.keys.device, kinds)
            found[index] = LayerCodecs(codecs, backend, None, layer.keys.shape[1])
    windows = {(plans[index].sink_tokens, plans[index].recent_tokens) for index in found}
    if len(windows) > 1:
        raise ValueError(f"sink_tokens, recent_tokens: must be the same in all layers (got {sorted(windows)})")
    group = math.lcm(*(codec.group for layer in found.values() for codec in layer.codecs.values()))
    return ModelCodecs(found, Windows(*windows.pop(), math.lcm(FLUSH_TOKENS, group), group))
