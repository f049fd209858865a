"""Models wrapped by PEFT: changes go to the inner model, which every call of the wrapper reaches."""

from typing import Any

import torch
from transformers import PreTrainedModel

_OWN_CACHE = {"PREFIX_TUNING", "CARTRIDGE"}
"""Adapter types that consist of keys and values; PEFT starts their generations with a dense cache of its own."""


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return a Transformers model, or the one inside a PEFT model."""
    inside: Any = None if isinstance(model, PreTrainedModel) else getattr(model, "get_base_model", None)
    inner = inside() if inside else model
    if not isinstance(inner, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers PreTrainedModel, or a PeftModel around one (got {type(model).__name__})"
        )
    return inner


def compressible(model: torch.nn.Module) -> PreTrainedModel:
    """Return the unwrapped model, if it uses the caches passed to it."""
    inner = unwrapped(model)
    kind = None if inner is model else getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if kind in _OWN_CACHE:
        raise ValueError(
            f"model: its adapter is of type {kind.value}. PEFT gives such a model a dense cache of its own, so nothing "
            "would be compressed. Other types work, such as LORA and PROMPT_TUNING"
        )
    return inner
