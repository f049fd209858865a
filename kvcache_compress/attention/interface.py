"""The attention function that Transformers calls, and the switch that turns it on for a model."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.modeling.adapters import compressible, unwrapped
from kvcache_compress.storage.paged import PagedStep
from kvcache_compress.storage.view import AttentionPath, View

from .position_hooks import register_fused_hooks, remove_fused_hooks

_warn_once = cache(logging.getLogger(__name__).warning)
ATTENTION_NAME = "kvcache_compress"
"""Start of the registered attention's names. While a decoder's config has one, `update()` returns views."""
_KNOWN = {"softcap", "s_aux", "is_causal", "output_attentions"}
"""Options of attention functions that `_path` or the fused paths take into account."""
_IDLE = {"position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "output_router_logits"}
_IDLE |= {"num_items_in_batch", "seq_idx", "max_length_q", "max_length_k", "logits_to_keep", "return_shared_kv_states"}
"""Options that do not change the result of attention."""
_IN_MASK = {"sliding_window", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Options that only flash attention reads; the masks of eager attention and SDPA already contain them."""


def fused_name(previous: str) -> str:
    """Name under which fused attention replaces the attention `previous`; it contains that name, so copies keep it.

    A plain string, because PyTorch before 2.13 does not compile subclasses. Swapped case and a backslash for a slash
    keep Transformers from taking it for a flash attention or for a kernel from the hub.
    """
    return f"{ATTENTION_NAME}_{previous.swapcase()}".replace("/", "\\")


def is_fused(name: str | None) -> bool:
    return name is not None and name.startswith(ATTENTION_NAME)


def _previous_name(config: PreTrainedConfig) -> str:
    """Name of the attention that fused attention replaces in this config, or would replace."""
    name: str = config._attn_implementation
    return name.removeprefix(f"{ATTENTION_NAME}_").replace("\\", "/").swapcase() if is_fused(name) else name


def _previous_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the module's attention function from before the switch; eager attention lives in the model's own file."""
    name = _previous_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    return sys.modules[type(module).__module__].eager_attention_forward


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Make the mask of the previous attention; the fused paths use the same mask."""
    return ALL_MASK_ATTENTION_FUNCTIONS[_previous_name(kwargs["config"])](*args, **kwargs)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | View | PagedStep,
    value: torch.Tensor | View | PagedStep,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as Transformers' attention functions do.

    Queries are `[B, Hq, n, D]`. Returns the output `[B, n, Hq, Dv]`, and the attention weights or None.
    """
    paged = kwargs.get("cache")
    if paged is not None and not isinstance(paged, Cache):  # continuous batching before Transformers 5.24
        key, value = kwargs.pop("cache").update(key, value, module.layer_idx, kwargs)
    if isinstance(key, View | PagedStep):
        call = AttentionCall.of(
            query, None if isinstance(key, PagedStep) else attention_mask,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=kwargs.get("softcap"), s_aux=kwargs.get("s_aux"),
        )  # fmt: skip
    if isinstance(key, PagedStep):
        options: dict[str, Any] = {"scaling": call.scaling, "softcap": call.softcap, "s_aux": call.s_aux}
        return key.attend(call, lambda *part: attention_forward(module, *part, **options)[0]), None
    if isinstance(key, View) and isinstance(value, View):
        key.close(call)
        path = _path(key, value, call, module, attention_mask, dropout, kwargs)
        if path is not None:
            return key.attend(call, value, path), None
        if _weights_wanted() or not Mask.supports(attention_mask):
            key, value = key.dense(), value.dense()
        else:
            attention_mask = key.over_tokens(call.mask).tensor
            key, value = key.stored(), value.stored()
    else:
        key, value = (x.dense() if isinstance(x, View) else x for x in (key, value))
    previous = _previous_attention(module)
    with _under_previous_name(module.config):
        return previous(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)


def _path(
    keys: View,
    values: View,
    call: AttentionCall,
    module: torch.nn.Module,
    mask: Any,
    dropout: float,
    options: Mapping[str, Any],
) -> AttentionPath | None:
    """Choose how to attend; None means the previous attention over decoded tokens."""
    inputs = call.query, mask, call.s_aux
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        return None
    if _weights_wanted() or options.get("output_attentions"):
        return None
    unknown = _unsupported(call, module, mask, dropout, options)
    if unknown is None:
        return keys.path(call, values)
    if keys.packed or torch.compiler.is_compiling():
        _warn_of_decoding(unknown)
    return None


def _unsupported(
    call: AttentionCall, module: torch.nn.Module, mask: Any, dropout: float, options: Mapping[str, Any]
) -> str | None:
    """Name what fused attention does not support about a call, worded for a warning, or None."""
    if dropout:
        return "dropout, which model.eval() switches off"
    if not Mask.supports(mask):
        return f"masks of type {type(mask).__name__}"
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # A mask with a row per query replaces causality, and a single query sees all tokens either way.
    if not causal and call.query.shape[2] > 1 and not call.mask.is_by_query:
        return "is_causal=False for several tokens without a mask"
    for name, value in options.items():
        if value is None or value is False or name in _KNOWN or name in _IDLE:
            continue
        if name not in _IN_MASK or _previous_name(module.config) not in ("sdpa", "eager"):
            return f"the option {name}"
    return None


@torch.compiler.assume_constant_result
def _warn_of_decoding(unknown: str) -> None:
    """Warn once about an unsupported option, also while a model is being compiled."""
    _warn_once(
        "fused attention does not support %s, so steps with it decode all packed tokens, which is slower. If you set "
        "it yourself, leave it out",
        unknown,
    )


def _weights_wanted() -> bool:
    """Ask Transformers' output collector for attention weights; some models, such as GPT-2, pass no option for them.

    If only layers are compiled, the collector is unreadable, and such models return no weights.
    """
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())


@contextmanager
def _under_previous_name(config: PreTrainedConfig) -> Iterator[None]:
    """Restore the previous name in the config within the block, because FlashAttention reads its version there."""
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

    Other caches keep using the previous attention. Continuous batching (`generate_batch`) has caches of its own and
    refuses a model in this state.

    Raises:
        ValueError: the model does not use Transformers' attention interface, or it accepts no cache but its own (PEFT's
            prefix tuning).
    """
    inner = compressible(model)
    decoder = inner.config.get_text_config(decoder=True)
    if not is_fused(decoder._attn_implementation):
        if not inner._can_set_attn_implementation():
            raise ValueError(
                f"{type(inner).__name__} does not use Transformers' attention interface, so fused attention is "
                "impossible. Compressed caches work without it, only slower"
            )
        name = fused_name(decoder._attn_implementation)
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, attention_mask)
        _switch(inner, decoder, name)
    register_fused_hooks(inner)


def disable_fused_attention(model: torch.nn.Module) -> None:
    """Restore the previous attention of `model`, or of the model that PEFT wraps."""
    inner = unwrapped(model)
    decoder = inner.config.get_text_config(decoder=True)
    if is_fused(decoder._attn_implementation):
        _switch(inner, decoder, _previous_name(decoder))
        remove_fused_hooks(inner)


def attends_fused(model: PreTrainedModel) -> bool:
    return is_fused(model.config.get_text_config(decoder=True)._attn_implementation)


def _switch(model: PreTrainedModel, decoder: PreTrainedConfig, name: str) -> None:
    part = next((key for key in model.config.sub_configs if getattr(model.config, key, None) is decoder), None)
    model.set_attn_implementation(name if part is None else {part: name})
    if decoder._attn_implementation != name:
        raise ValueError(f"{type(model).__name__}: the attention of its decoder could not be switched to {name!r}")
