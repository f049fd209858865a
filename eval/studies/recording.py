"""What modules of a model put out while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The attention module of each layer that has exactly one."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            found.setdefault(index, []).append(module)
    return {index: modules[0] for index, modules in found.items() if len(modules) == 1}


@contextmanager
def outputs_of(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """What these modules give while the context is open, a tensor per pass."""
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(index: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, given, output: seen.setdefault(index, []).append(
            output[0] if isinstance(output, tuple) else output
        )

    hooks = [module.register_forward_hook(keep(index)) for index, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rms_error(found: Sequence[torch.Tensor] | None, expected: Sequence[torch.Tensor] | None) -> float | None:
    """RMS error over the RMS expected, over all passes `[B, S, D]`; None where only zeros, or nothing, is there."""
    if not found or not expected:
        return None
    right = torch.cat(list(expected), 1).double()
    error = (torch.cat(list(found), 1).double() - right).norm()
    return (error / right.norm()).item() if right.any() else None
