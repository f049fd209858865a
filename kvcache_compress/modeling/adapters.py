"""Models that PEFT wraps: the model inside is ours to change, since every call of the wrapper reaches it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

_OWN_CACHE = {"PREFIX_TUNING", "CARTRIDGE"}
"""Kinds of adapters that are keys and values: with them PEFT begins each generation with a dense cache of its own."""


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """A model of Transformers, or the one inside a model of PEFT.

    Raises:
        ValueError: neither.
    """
    inside: Any = None if isinstance(model, PreTrainedModel) else getattr(model, "get_base_model", None)
    inner = inside() if inside else model
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"model={type(model).__name__}: a transformers PreTrainedModel, or a PeftModel of one, is needed"
        )
    return inner


def compressible(model: torch.nn.Module) -> PreTrainedModel:
    """`unwrapped`, if the model uses the caches that it is given.

    Raises:
        ValueError: as `unwrapped`, and where PEFT puts a cache of its own in their place.
    """
    inner = unwrapped(model)
    kind = None if inner is model else getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if kind in _OWN_CACHE:
        raise ValueError(
            f"model: its adapter is of type {kind.value}, for which PEFT replaces any cache by a dense one of its own, "
            "so that nothing would be compressed; other types, as LORA and PROMPT_TUNING, are allowed"
        )
    return inner
