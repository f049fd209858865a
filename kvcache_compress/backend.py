"""Which code runs the packed part: Triton kernels or their torch twins. Resolved once per layer, logged once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from .codec import Backend

logger = logging.getLogger(__name__)
BackendChoice: TypeAlias = Literal["auto", "triton", "torch"]


def interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_backend(choice: BackendChoice) -> None:
    """Raises `ValueError` at construction where an explicit `backend="triton"` cannot be had."""
    if choice != "triton":
        return
    if find_spec("triton") is None:
        raise ValueError('backend="triton" cannot be had: triton is not installed; use backend="torch" or "auto"')
    if not torch.cuda.is_available() and not interpreting():
        raise ValueError(
            'backend="triton" cannot be had: there is no GPU (and TRITON_INTERPRET=1 is not set); '
            'use backend="torch" or "auto"'
        )


def resolve_backend(choice: BackendChoice, device: torch.device) -> Backend:
    """The backend for tensors on `device`."""
    backend: Backend = "torch"
    if choice == "triton":
        if device.type != "cuda" and not interpreting():
            raise ValueError(f'backend="triton" cannot be had for tensors on {device.type}: a GPU is needed')
        backend = "triton"
    elif choice == "auto" and device.type == "cuda" and find_spec("triton") is not None:
        backend = "triton"
    _log_once(backend, device.type)
    return backend


@contextmanager
def on_device(x: torch.Tensor) -> Iterator[None]:
    """For codecs and attention: makes the device of `x` the current one, since Triton launches there, and switches
    autocast off, under which float32 arithmetic would be done in 16 bits."""
    kind = x.device.type
    narrows = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    with (
        torch.cuda.device(x.device) if x.is_cuda else nullcontext(),
        torch.autocast(kind, enabled=False) if narrows else nullcontext(),
    ):
        yield


@cache
def _log_once(backend: str, device: str) -> None:
    logger.info("packed cache on %s runs on the %s backend", device, backend)
