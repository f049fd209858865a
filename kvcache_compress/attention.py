"""Our attention function in Transformers: registered by name, switched on per model, and its dispatch.

Without packed tokens (prefill) the model's previous attention runs on the fresh tensors. With packed tokens and a few
queries, in C++ a few more, the fused path runs over the compressed cache; many queries attend to long caches tile by
tile. Anything else - gradients, attention weights, options that these do not know - decodes one layer and runs the
previous attention with its own mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from .adapters import compressible, unwrapped
from .chunk import ChunkKV
from .layer import ATTENTION_NAME
from .positions import hand_over_positions, unhook_positions
from .view import MAX_DECODE_TOKENS, PackedKV

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
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as Transformers calls it, arguments in its order: query `[B, Hq, n, D]`, output `[B, n, Hq, Dv]`."""
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
    """What the previous attention gets: of a chunk without the room that is left, where mask and weights allow it."""
    narrow = (mask is None or isinstance(mask, torch.Tensor)) and not _weights_wanted()
    if narrow and isinstance(key, ChunkKV) and isinstance(value, ChunkKV):
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
    if kwargs.get("is_causal", mask is not None or getattr(module, "is_causal", True)) is False or _weights_wanted():
        return False
    known = _WITHOUT_EFFECT | {"softcap", "s_aux"}
    return all(value is None or value is False or name in known for name, value in kwargs.items())


def _weights_wanted() -> bool:
    """Whether this forward returns attention weights: several families, such as GPT-2, do not pass the option on.

    Code in which only layers are compiled cannot ask: there, those families' weights are not returned.
    """
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


def enable_fused_attention(model: torch.nn.Module) -> None:
    """Lets `model`, or the model inside PEFT's, attend over compressed caches directly.

    Other caches go on through its previous attention. Continuous batching (`generate_batch`) has caches of its own and
    refuses a model in this state.

    Raises:
        ValueError: the model's attention cannot be switched by Transformers' attention interface, or it uses no cache
            but its own (PEFT's prefix tuning).
    """
    inner = compressible(model)
    decoder = _decoder_config(inner)
    if decoder._attn_implementation != ATTENTION_NAME:
        if not inner._can_set_attn_implementation():
            raise ValueError(
                f"{type(inner).__name__} does not take its attention from Transformers' attention interface, so it "
                "cannot be switched; compressed caches work with it without fused attention, only slower"
            )
        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
        _switch(inner, decoder, AttentionName(decoder._attn_implementation))
    hand_over_positions(inner)


def disable_fused_attention(model: torch.nn.Module) -> None:
    """Gives `model`, or the model inside PEFT's, its previous attention back."""
    inner = unwrapped(model)
    decoder = _decoder_config(inner)
    if decoder._attn_implementation == ATTENTION_NAME:
        _switch(inner, decoder, _previous_name(decoder))
        unhook_positions(inner)


def attends_fused(model: PreTrainedModel) -> bool:
    """Whether fused attention is on."""
    return bool(_decoder_config(model)._attn_implementation == ATTENTION_NAME)


def _decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _switch(model: PreTrainedModel, decoder: PreTrainedConfig, name: str) -> None:
    part = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is decoder), None)
    model.set_attn_implementation(name if part is None else {part: name})
    if decoder._attn_implementation != name:
        raise ValueError(f"{type(model).__name__}: the attention of its decoder could not be switched to {str(name)!r}")
