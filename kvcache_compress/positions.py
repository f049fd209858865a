"""Hooks by which a model tells a cache what `update` is not told: its tokens' position embeddings, and its switch.

Position embeddings go to caches that encode keys before RoPE. The switch is that of fused attention, which is in the
model's config; a cache may have been built from another object with the same content.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .adapters import unwrapped
from .cache import CompressedCache
from .layer import CompressedLayer


def hand_over_positions(model: torch.nn.Module) -> None:
    """Lets the attention modules of a model, or of one that PEFT wraps, hand over their position embeddings to a cache.

    `enable_fused_attention` and `compress` do so too. Without it CommVQ encodes the tokens of left-padded rows as if
    at other positions than theirs.
    """
    inner = unwrapped(model)
    if hands_over_positions(inner):
        return
    decoder = inner.config.get_text_config(decoder=True)
    for module in inner.modules():
        if isinstance(module, PreTrainedModel) and module.config.get_text_config(decoder=True) is decoder:
            module.register_forward_pre_hook(functools.partial(_follow, decoder), with_kwargs=True)
        names = tuple(inspect.signature(module.forward).parameters) if hasattr(module, "layer_idx") else ()
        if "position_embeddings" in names:
            module.register_forward_pre_hook(functools.partial(_hand_over, names), with_kwargs=True)


def hands_over_positions(model: PreTrainedModel) -> bool:
    """Whether `hand_over_positions` was called, and not taken back."""
    return any(True for _ in _hooks(model))


def unhook_positions(model: PreTrainedModel) -> None:
    """Takes `hand_over_positions` back."""
    for module, number in list(_hooks(model)):
        del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _hooks(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, int]]:
    """Modules with a hook of ours, and its number there: a copy of a model has hooks as the model has."""
    for module in model.modules():
        for number, hook in module._forward_pre_hooks.items():
            if isinstance(hook, functools.partial) and hook.func in (_follow, _hand_over):
                yield module, number


def _follow(decoder: PreTrainedConfig, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of a model with this config, its own and its decoder's: only one of them may be called."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, CompressedCache):
            value.follow(decoder)


def _hand_over(names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of an attention module with parameters `names`, hidden states first; the cache's name differs by family."""
    given = dict(zip(names, args, strict=False)) | kwargs
    caches = [x for x in given.values() if isinstance(x, CompressedCache)]
    layer = caches[0].layers[module.layer_idx] if caches else None
    if isinstance(layer, CompressedLayer) and layer.track is not None:
        layer.track.given = _of_step(given.get("position_embeddings"), given[names[0]].shape[1])


def _of_step(embeddings: Any, count: int) -> Any:
    """cos and sin of the last `count` tokens: some models hand them over for all that are cached."""
    return tuple(x[:, -count:] for x in embeddings) if isinstance(embeddings, tuple) else None
