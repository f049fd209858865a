"""Position embeddings, which hooks of attention modules hand over to a cache that encodes keys before RoPE."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .cache import CompressedCache
from .layer import CompressedLayer

_HOOKS: weakref.WeakKeyDictionary[PreTrainedModel, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def hand_over_positions(model: PreTrainedModel) -> None:
    """Lets the model's attention modules hand over their position embeddings to a cache that asks for them.

    `enable_fused_attention` and `compress` do so too. Without it CommVQ encodes the tokens of left-padded rows as if
    at other positions than theirs.
    """
    if hands_over_positions(model):
        return
    _HOOKS[model] = []
    for module in model.modules():
        names = tuple(inspect.signature(module.forward).parameters) if hasattr(module, "layer_idx") else ()
        if "position_embeddings" in names:
            hook = functools.partial(_hand_over, names)
            _HOOKS[model].append(module.register_forward_pre_hook(hook, with_kwargs=True))


def hands_over_positions(model: PreTrainedModel) -> bool:
    """Whether `hand_over_positions` was called, and not taken back."""
    return model in _HOOKS


def unhook_positions(model: PreTrainedModel) -> None:
    """Takes `hand_over_positions` back."""
    for handle in _HOOKS.pop(model, []):
        handle.remove()


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
