"""Hooks by which a model tells a cache what `update` is not told: its tokens' position embeddings, and its config.

Position embeddings go to caches that encode keys before RoPE. The config is where fused attention is switched on and
off; a cache may have been built from another object with the same content.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_compress.modeling.adapters import unwrapped

_FUSED = "fused attention"
"""Owner of the hooks that `enable_fused_attention` adds, as against a caller of `register_position_hooks`."""


class ModelListener:
    """A cache that the hooks of a model call in each step."""

    def follow(self, decoder_config: PreTrainedConfig) -> None:
        """Takes over the config of the model's decoder, where fused attention is switched."""
        raise NotImplementedError

    def receive_positions(self, layer: int, embeddings: Any, tokens: int) -> None:
        """Takes the position embeddings of a step of so many tokens, as its attention module in `layer` gets them."""
        raise NotImplementedError


class PositionHooks:
    """Handle of the hooks that `register_position_hooks` added; also a context manager that removes them at its end."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Removes the hooks from the model; a second call does nothing."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_position_hooks(model: torch.nn.Module) -> PositionHooks:
    """Have the attention modules of a model, or of one that PEFT wraps, hand their position embeddings to a cache.

    `enable_fused_attention` and `compress` do so too. Without it CommVQ encodes the tokens of left-padded rows as if
    they stood at other positions.

    Returns:
        A handle, whose `remove()` takes the hooks off the model again.

    Raises:
        ValueError: not a model of Transformers or PEFT.
    """
    return PositionHooks(_register(unwrapped(model), "caller"))


def register_fused_hooks(model: PreTrainedModel) -> None:
    """Add the hooks of fused attention, unless the model, or the one it was copied from, has them."""
    if not any(True for _ in _fused_hooks(model)):
        _register(model, _FUSED)


def remove_fused_hooks(model: PreTrainedModel) -> None:
    """Remove the hooks of fused attention, also from a copy of the model that got them."""
    for module, number in list(_fused_hooks(model)):
        del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]


def _register(model: PreTrainedModel, owner: str) -> list[RemovableHandle]:
    decoder, handles = model.config.get_text_config(decoder=True), []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config.get_text_config(decoder=True) is decoder:
            hook = functools.partial(_follow, owner, decoder)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        names = tuple(inspect.signature(module.forward).parameters) if hasattr(module, "layer_idx") else ()
        if "position_embeddings" in names:
            hook = functools.partial(_hand_over, owner, names)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _fused_hooks(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, int]]:
    """Modules with a hook of fused attention, and its number there."""
    for module in model.modules():
        for number, hook in module._forward_pre_hooks.items():
            if isinstance(hook, functools.partial) and hook.func in (_follow, _hand_over) and hook.args[0] == _FUSED:
                yield module, number


def _follow(owner: str, decoder: PreTrainedConfig, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of a model with this config, its own and its decoder's: only one of them may be called."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, ModelListener):
            value.follow(decoder)


def _hand_over(owner: str, names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of an attention module with parameters `names`, hidden states first; the cache's name differs by family."""
    inputs = dict(zip(names, args, strict=False)) | kwargs
    for value in inputs.values():
        if isinstance(value, ModelListener):
            tokens = inputs[names[0]].shape[1]
            value.receive_positions(module.layer_idx, inputs.get("position_embeddings"), tokens)
            return
