"""Recording of the outputs of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Attention modules by layer index, of layers with exactly one."""
    modules: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            modules.setdefault(index, []).append(module)
    return {index: of_layer[0] for index, of_layer in modules.items() if len(of_layer) == 1}


@contextmanager
def record_outputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Record the outputs of modules while the context is open, a tensor per pass."""
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(index: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: seen.setdefault(index, []).append(
            output[0] if isinstance(output, tuple) else output
        )

    hooks = [module.register_forward_hook(keep(index)) for index, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rms_error(actual: Sequence[torch.Tensor] | None, expected: Sequence[torch.Tensor] | None) -> float | None:
    """RMS error over the RMS of `expected`, over all passes `[B, S, D]`; None if that is missing or zero."""
    if not actual or not expected:
        return None
    right = torch.cat(list(expected), 1).double()
    error = (torch.cat(list(actual), 1).double() - right).norm()
    return (error / right.norm()).item() if right.any() else None
