"""Observe the queries and keys of a model's attention, as its attention function gets them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Observer = Callable[[int, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Called with the layer's index, queries `[B, Hq, T, D]`, keys `[B, H, T, D]` and the call's options."""


@contextmanager
def observed_attention(model: PreTrainedModel, observer: Observer) -> Iterator[bool]:
    """Call `observer` before each attention call while open; yields whether the model's calls can be observed.

    They cannot for models whose attention function Transformers does not look up by name. Eager attention, which is in
    the model's own file, is looked up as well.
    """
    name = str(model.config.get_text_config(decoder=True)._attn_implementation)
    named = ALL_ATTENTION_FUNCTIONS.get(name)
    if named is None and not (name == "eager" and model._can_set_attn_implementation()):
        yield False
        return

    def observe(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        observer(int(module.layer_idx), query, key, options)  # type: ignore[arg-type]
        attend = named or sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, *args, **options)

    before = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = observe
    try:
        yield True
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if before is not None:
            ALL_ATTENTION_FUNCTIONS[name] = before
