"""The attention function that Transformers calls: registered by name and switched on per model.

Without packed tokens (prefill) the model's previous attention runs on the new tensors. With packed tokens `path.py`
chooses; where it finds no path, the previous attention runs over the decoded layer, with its own mask.
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

from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.modeling.adapters import compressible, unwrapped

from .handle import PackedKV, Step
from .path import DECODE, attention_path, record, weights_wanted
from .position_hooks import register_fused_hooks, remove_fused_hooks

ATTENTION_NAME = "kvcache_compress"
"""Name of the registered attention; while it is set in a decoder's config, `update()` returns `PackedKV`."""


class AttentionName(str):
    """The registered name, with the name of the attention that it replaces, so that both are copied with a config."""

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
    """Return the attention function that this module used before; eager attention is in the model's own file."""
    name = _previous_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    return sys.modules[type(module).__module__].eager_attention_forward


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Make the mask of the previous attention, which the fused paths take too."""
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
    """Attend as Transformers' attention functions do: query `[B, Hq, n, D]`, output `[B, n, Hq, Dv]` and weights."""
    if isinstance(key, PackedKV) and isinstance(value, PackedKV):
        step = key.step
        call = AttentionCall.of(
            query, attention_mask, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=kwargs.get("softcap"), s_aux=kwargs.get("s_aux"),
        )  # fmt: skip
        closed = isinstance(step, Step) and step.close(call)
        path = attention_path(step, call, module, attention_mask, dropout, kwargs)
        if path is not None:
            return step.attend(call, path), None
        if not (closed or torch.compiler.is_compiling()):
            record(DECODE, query.shape[2])
        if weights_wanted() or not Mask.supports(attention_mask):
            key, value = step.dense("keys"), step.dense("values")
        else:
            key, value, attention_mask = step.without_spare_capacity(attention_mask)
    else:
        key, value = (x.step.dense(x.side) if isinstance(x, PackedKV) else x for x in (key, value))
    previous = _previous_attention(module)
    with _under_previous_name(module.config):
        return previous(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


@contextmanager
def _under_previous_name(config: PreTrainedConfig) -> Iterator[None]:
    """Restore the previous name in the config for the block: FlashAttention reads its version there."""
    ours, name = config._attn_implementation, _previous_name(config)
    if "flash" not in name:
        yield
        return
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = ours


def enable_fused_attention(model: torch.nn.Module) -> None:
    """Let `model`, or the model that PEFT wraps, attend to compressed caches without decoding them.

    Its previous attention still serves other caches. Continuous batching (`generate_batch`) has caches of its own and
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
    register_fused_hooks(inner)


def disable_fused_attention(model: torch.nn.Module) -> None:
    """Give `model`, or the model that PEFT wraps, its previous attention back."""
    inner = unwrapped(model)
    decoder = _decoder_config(inner)
    if decoder._attn_implementation == ATTENTION_NAME:
        _switch(inner, decoder, _previous_name(decoder))
        remove_fused_hooks(inner)


def attends_fused(model: PreTrainedModel) -> bool:
    """Return True if fused attention is on."""
    return bool(_decoder_config(model)._attn_implementation == ATTENTION_NAME)


def _decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _switch(model: PreTrainedModel, decoder: PreTrainedConfig, name: str) -> None:
    part = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is decoder), None)
    model.set_attn_implementation(name if part is None else {part: name})
    if decoder._attn_implementation != name:
        raise ValueError(f"{type(model).__name__}: the attention of its decoder could not be switched to {str(name)!r}")
