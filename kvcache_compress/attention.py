"""Our attention function in Transformers: registered by name, switched on per model, and its dispatch.

Without packed tokens (prefill) the model's previous attention runs on the fresh tensors. With packed tokens and a few
queries, in C++ a few more, the fused path runs over the compressed cache; many queries attend to long caches tile by
tile. Anything else - gradients, options that these do not know - decodes one layer and runs the previous
attention with its own mask.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import CompressedCache
from .chunk import ChunkKV
from .config import CompressionConfig, load_config
from .layer import ATTENTION_NAME
from .positions import hand_over_positions, hands_over_positions, unhook_positions
from .view import MAX_DECODE_TOKENS, PackedKV

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {"position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "is_causal"}


class AttentionName(str):
    """Our registered name, which remembers the attention that it stands in for and is copied with the config."""

    previous: str

    def __new__(cls, previous: str) -> AttentionName:
        name = super().__new__(cls, ATTENTION_NAME)
        name.previous = previous
        return name

    def __getnewargs__(self) -> tuple[str]:
        return (self.previous,)


def _previous_name(config: PreTrainedConfig) -> str:
    return getattr(config._attn_implementation, "previous", "sdpa")


def _previous_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """The function that this attention module used before; eager attention lives in the model's own file."""
    name = _previous_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    return sys.modules[type(module).__module__].eager_attention_forward


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of the previous attention, which serves the fused path as well."""
    return ALL_MASK_ATTENTION_FUNCTIONS[_previous_name(kwargs["config"])](*args, **kwargs)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PackedKV,
    value: torch.Tensor | PackedKV,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as Transformers calls it: query `[B, Hq, n, D]`, output `[B, n, Hq, Dv]`."""
    if (
        isinstance(key, PackedKV)
        and isinstance(value, PackedKV)
        and _fusable(module, key, query, attention_mask, dropout, kwargs)
    ):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return key.attend(query, attention_mask, scale, kwargs.get("softcap"), kwargs.get("s_aux")), None
    dense_key, dense_value, mask = _decoded(key, value, attention_mask)
    previous = _previous_attention(module)
    with _under_previous_name(module.config):
        return previous(module, query, dense_key, dense_value, mask, scaling=scaling, dropout=dropout, **kwargs)


def _decoded(
    key: torch.Tensor | PackedKV, value: torch.Tensor | PackedKV, mask: Any
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What the previous attention gets: of a chunk without the room that is left, where its mask can do without."""
    if isinstance(key, ChunkKV) and isinstance(value, ChunkKV) and (mask is None or isinstance(mask, torch.Tensor)):
        return key.there(mask)
    both = (side.dense() if isinstance(side, PackedKV) else side for side in (key, value))
    return *both, mask


@contextmanager
def _under_previous_name(config: PreTrainedConfig) -> Iterator[None]:
    """FlashAttention is one function for all its versions, and asks the config which one is meant."""
    ours, name = config._attn_implementation, _previous_name(config)
    if "flash" not in name:
        yield
        return
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = ours


def _fusable(
    module: torch.nn.Module, key: PackedKV, query: torch.Tensor, mask: Any, dropout: float, kwargs: dict[str, Any]
) -> bool:
    """Whether the fused path computes exactly what was asked for, and of many queries whether there is one."""
    if query.shape[2] > MAX_DECODE_TOKENS and key.way(query, kwargs.get("softcap")) is None:
        return False
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (query, mask, kwargs.get("s_aux"))):
        return False
    if dropout or not (mask is None or isinstance(mask, torch.Tensor)):
        return False
    if kwargs.get("is_causal", mask is not None or getattr(module, "is_causal", True)) is False:
        return False
    known = _WITHOUT_EFFECT | {"softcap", "s_aux"}
    return all(value is None or value is False or name in known for name, value in kwargs.items())


def enable_fused_attention(model: PreTrainedModel) -> None:
    """Lets `model` attend over compressed caches directly. Other caches go on through its previous attention.

    Caches must be built from this model's own `config`, which is where they see that fused attention is on.
    Continuous batching (`generate_batch`) has caches of its own and refuses a model in this state.

    Raises:
        ValueError: the model's attention cannot be switched by Transformers' attention interface.
    """
    decoder = _decoder_config(model)
    if decoder._attn_implementation == ATTENTION_NAME:
        return
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} does not take its attention from Transformers' attention interface, so it cannot "
            "be switched; compressed caches work with it without fused attention, only slower"
        )
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
    _switch(model, decoder, AttentionName(decoder._attn_implementation))
    hand_over_positions(model)


def disable_fused_attention(model: PreTrainedModel) -> None:
    """Gives `model` its previous attention back."""
    decoder = _decoder_config(model)
    if decoder._attn_implementation == ATTENTION_NAME:
        _switch(model, decoder, _previous_name(decoder))
        unhook_positions(model)


def _decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model={type(model).__name__}: a transformers PreTrainedModel is needed")
    return model.config.get_text_config(decoder=True)


def _switch(model: PreTrainedModel, decoder: PreTrainedConfig, name: str) -> None:
    part = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is decoder), None)
    model.set_attn_implementation(name if part is None else {part: name})
    if decoder._attn_implementation != name:
        raise ValueError(f"{type(model).__name__}: the attention of its decoder could not be switched to {str(name)!r}")


@dataclass
class Compression:
    """Handle of a `compress` block, with the cache of the latest `generate` call in it."""

    config: CompressionConfig
    cache: CompressedCache | None = None

    @property
    def last_cache(self) -> CompressedCache:
        """The cache of the latest `generate` call; raises `RuntimeError` where there was none."""
        if self.cache is None:
            raise RuntimeError("no cache yet: call model.generate inside the compress block first")
        return self.cache


@contextmanager
def _without_cache_implementation(*settings: GenerationConfig) -> Iterator[None]:
    """Generation refuses a cache beside a kind of cache, and the caller asked for ours."""
    kinds = [one.cache_implementation for one in settings]
    for one in settings:
        one.cache_implementation = None
    try:
        yield
    finally:
        for one, kind in zip(settings, kinds, strict=True):
            one.cache_implementation = kind


@contextmanager
def compress(
    model: PreTrainedModel,
    config: CompressionConfig | str | dict[str, Any],
    *,
    fused: bool | None = None,
) -> Iterator[Compression]:
    """Within the block `model.generate` uses a compressed cache wherever it would make one of its own.

    Pipelines and other clients that only call `generate` need not know; a `cache_implementation` that they ask for
    gives way. A call that brings its own `past_key_values`, or `use_cache=False`, is left alone, and so are calls that
    `generate` makes of itself: drafts of early exit have a dense cache.

    Args:
        model: a decoder-only model.
        config: what `load_config` takes: a preset's name, a path, a dictionary or a config.
        fused: fused attention on, off, or (None) on where the model's attention can be switched.

    Raises:
        ValueError: as `CompressedCache` does, on entry.
    """
    handle = Compression(load_config(config))
    CompressedCache(model.config, handle.config)
    generate, outer = model.generate, vars(model).get("generate")
    was_fused = _decoder_config(model)._attn_implementation == ATTENTION_NAME
    was_handed_over = hands_over_positions(model)

    running = threading.local()

    @functools.wraps(generate)
    def generate_compressed(*args: Any, **kwargs: Any) -> Any:
        if vars(running):  # Early exit drafts by a `generate` of the first layers, within that of the whole model.
            return generate(*args, **kwargs)
        bound = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        settings = bound.get("generation_config") or model.generation_config
        own = kwargs.get("past_key_values") is not None
        running.generate = True
        try:
            if own or kwargs.get("use_cache", settings.use_cache) is False:
                return generate(*args, **kwargs)
            handle.cache = CompressedCache(model.config, handle.config)
            kwargs.pop("cache_implementation", None)
            with _without_cache_implementation(settings, model.generation_config):
                return generate(*args, past_key_values=handle.cache, **kwargs)
        finally:
            del running.generate

    if fused or (fused is None and model._can_set_attn_implementation()):
        enable_fused_attention(model)
    elif fused is False:
        disable_fused_attention(model)
        hand_over_positions(model)
    else:
        hand_over_positions(model)
        logger.warning("the attention of %s cannot be switched: decoding each step instead", type(model).__name__)
    model.generate = generate_compressed
    try:
        yield handle
    finally:
        if outer is None:
            del model.generate
        else:
            model.generate = outer
        (enable_fused_attention if was_fused else disable_fused_attention)(model)
        (hand_over_positions if was_handed_over else unhook_positions)(model)
