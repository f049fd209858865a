"""Devices: where constants are made, and where codecs and attention run."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context, or decorator, in which constants are made on the CPU, whatever PyTorch's default device is."""
    with torch.device("cpu"):
        yield


def interpreting() -> bool:
    """True if Triton runs kernels in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Context that makes the device of `x` current and switches autocast off.

    Triton launches on the current device, and autocast would turn float32 arithmetic into 16 bits.
    """
    kind = x.device.type
    narrows = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return _changed(x.device if elsewhere else None, kind if narrows else None) if narrows or elsewhere else _AS_IT_IS


_has_autocast = cache(torch.amp.is_autocast_available)
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


@contextmanager
def _changed(device: torch.device | None, autocast: str | None) -> Iterator[None]:
    with (
        nullcontext() if device is None else torch.cuda.device(device),
        nullcontext() if autocast is None else torch.autocast(autocast, enabled=False),
    ):
        yield
