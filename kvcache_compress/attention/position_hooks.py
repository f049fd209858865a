"""Forward hooks that give a cache what `update` does not receive: positions, the mask and the decoder's config.

Caches that encode keys before RoPE need the position embeddings. The config holds the switch of fused attention; a
cache may have been built from another config object with the same content.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_compress.modeling.adapters import unwrapped

_FUSED = "fused attention"
"""Owner of the hooks added by `enable_fused_attention`; hooks of `register_position_hooks` belong to its caller."""


class ModelListener:
    """Interface of caches that receive calls from a model's hooks in each step, described in `CompressedCache`."""

    def follow(self, decoder_config: PreTrainedConfig) -> None: ...
    def receive_mask(self, mask: Any) -> None: ...
    def receive_positions(self, layer: int, embeddings: Any, tokens: int) -> None: ...


class PositionHooks(ExitStack):
    """Hooks added by `register_position_hooks`. `remove()`, or the end of a `with` block, removes them."""

    remove = ExitStack.close


def register_position_hooks(model: torch.nn.Module) -> PositionHooks:
    """Make a model's attention modules pass their position embeddings to the cache.

    `enable_fused_attention` and `compress` do this already. Without it, methods that encode keys before RoPE (CommVQ,
    spectral) lose accuracy in left-padded batches. The handle's `remove()` removes the hooks.

    Raises:
        ValueError: `model` is neither a Transformers nor a PEFT model.
    """
    hooks = PositionHooks()
    for handle in _register(unwrapped(model), "caller"):
        hooks.callback(handle.remove)
    return hooks


def register_fused_hooks(model: PreTrainedModel) -> None:
    """Add the hooks of fused attention, unless the model already has them (a copied model keeps its hooks)."""
    if not any(True for _ in _fused_hooks(model)):
        _register(model, _FUSED)


def remove_fused_hooks(model: PreTrainedModel) -> None:
    """Remove the hooks of fused attention, also from a copy of the model that received them."""
    for module, number in list(_fused_hooks(model)):
        del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _register(model: PreTrainedModel, owner: str) -> list[RemovableHandle]:
    decoder, handles = model.config.get_text_config(decoder=True), []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.get_text_config(decoder=True) is decoder:
            hook = functools.partial(_follow, owner, decoder, tuple(inspect.signature(module.forward).parameters))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        names = tuple(inspect.signature(module.forward).parameters) if hasattr(module, "layer_idx") else ()
        if "position_embeddings" in names:
            hook = functools.partial(_hand_over, owner, names)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _fused_hooks(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, int]]:
    """Yield each module that has a hook of fused attention, with the hook's number."""
    for module in model.modules():
        for number, hook in module._forward_pre_hooks.items():
            if isinstance(hook, functools.partial) and hook.func in (_follow, _hand_over) and hook.args[0] == _FUSED:
                yield module, number


def _follow(
    owner: str,
    decoder: PreTrainedConfig,
    names: tuple[str, ...],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Pass the decoder's config and the attention mask to the cache.

    The hook is on the model and on its decoder, since either may be called alone. Compiled code passes no mask.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, ModelListener):
            value.follow(decoder)
            if not torch.compiler.is_compiling():
                inputs = dict(zip(names, args, strict=False)) | kwargs
                value.receive_mask(inputs.get("attention_mask"))


def _hand_over(owner: str, names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pass position embeddings to the cache among the arguments; `names` are the parameters, hidden states first."""
    inputs = dict(zip(names, args, strict=False)) | kwargs
    for value in inputs.values():
        if isinstance(value, ModelListener):
            tokens = inputs[names[0]].shape[1]
            value.receive_positions(module.layer_idx, inputs.get("position_embeddings"), tokens)
            return
