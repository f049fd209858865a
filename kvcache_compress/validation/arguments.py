"""Checks of single arguments: devices, counts and row numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from .messages import quoted


def usable_device(device: torch.device | str | None) -> torch.device:
    """A device of this machine by its name, the CPU for None.

    Raises:
        ValueError: no device, one that is not there, or `meta`, which holds no data.
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
    """`count` as a number; raises `TypeError` or `ValueError` for what is no whole number from 1 on."""
    whole = operator.index(count)
    if whole < 1:
        raise ValueError(f"{name}={count}: allowed 1 and more")
    return whole


def row_numbers(name: str, rows: Any, batch: int) -> torch.Tensor:
    """Numbers `[n]` of the rows of a batch that a tensor or a list of numbers, or a boolean mask, selects.

    Raises:
        ValueError, TypeError: anything else. IndexError: rows that there are not, numbers that are not whole.
    """
    chosen = torch.tensor(rows) if isinstance(rows, (list, tuple)) else rows
    if not isinstance(chosen, torch.Tensor) or chosen.ndim != 1:
        raise ValueError(f"{name}={rows}: allowed a tensor or a list of row numbers, or a boolean mask")
    return torch.arange(batch, device=chosen.device)[chosen]
