"""Gradients of a step's own keys and values. What a cache holds is constant: it is stored without a graph."""

from __future__ import annotations

import torch


def wanted(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether attention to these new keys and values must be differentiable."""
    return (keys.requires_grad or values.requires_grad) and torch.is_grad_enabled()


def with_step(dense: torch.Tensor, states: torch.Tensor, start: torch.Tensor | int) -> torch.Tensor:
    """`dense` `[B, H, T, D]` with a step's own tokens `[B, H, n, D]` from `start` on as they were given.

    They have their gradients there, which those that were read back from a cache have lost.
    """
    at = torch.arange(states.shape[2], device=dense.device) + start
    return dense.index_copy(2, at, states.to(dense.dtype))
