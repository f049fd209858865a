"""Checks of single arguments: devices, counts and row numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .messages import quoted


def usable_device(device: torch.device | str | None) -> torch.device:
    """Resolve a device by its name; None is the CPU.

    Raises:
        ValueError: The name is unknown, this machine has no such device, or it is `meta`, which holds no data.
    """
    try:
        found = torch.empty(0, device="cpu" if device is None else device).device
        reason = "it holds no data" if found.type == "meta" else None
    except (RuntimeError, AssertionError, TypeError, ValueError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
    if reason is not None:
        raise ValueError(f"device={quoted(device)} is unavailable: {reason}")
    return found


def positive_count(name: str, count: Any) -> int:
    """Convert `count` to an integer; raises `TypeError` if it is not a whole number, `ValueError` if it is below 1."""
    whole = operator.index(count)
    if whole < 1:
        raise ValueError(f"{name}={count}: allowed 1 and more")
    return whole


def row_numbers(name: str, rows: Any, batch: int) -> torch.Tensor:
    """Resolve row numbers or a boolean mask, a tensor or a list, to the numbers `[n]` of the selected rows of a batch.

    Raises:
        ValueError, TypeError: `rows` is neither.
        IndexError: A row does not exist, or a number is not whole.
    """
    chosen = torch.tensor(rows) if isinstance(rows, (list, tuple)) else rows
    if not isinstance(chosen, torch.Tensor) or chosen.ndim != 1:
        raise ValueError(f"{name}={rows}: allowed a tensor or a list of row numbers, or a boolean mask")
    return torch.arange(batch, device=chosen.device)[chosen]
