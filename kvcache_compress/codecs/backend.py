"""Backends that encode tokens and attend to packed ones: Triton, C++ or torch, chosen once per layer."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from .base import Backend, Codec

logger = logging.getLogger(__name__)
_Encoded = TypeVar("_Encoded")
BackendChoice: TypeAlias = Literal["auto", "triton", "cpp", "torch"]


def interpreting() -> bool:
    """True if Triton runs its kernels in its interpreter, which needs no GPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_backend(choice: BackendChoice, codecs: Iterable[type[Codec]]) -> None:
    """Raise `ValueError` if an explicitly chosen backend is unavailable here or for one of the codecs."""
    if choice == "auto" or choice == "torch":
        return
    for codec in codecs:
        if not codec.runs_on(choice):
            raise ValueError(
                f'backend="{choice}" is unavailable for method {codec.name!r}; use backend="torch" or "auto"'
            )
    if problem := _cpp_problem() if choice == "cpp" else _triton_problem():
        raise ValueError(f'backend="{choice}" is unavailable: {problem}; use backend="torch" or "auto"')


def resolve_backend(choice: BackendChoice, device: torch.device, codecs: Iterable[Codec | type[Codec]] = ()) -> Backend:
    """Resolve the backend of a layer with these codecs on `device`; `auto` takes torch if a codec has no faster one.

    Raises:
        ValueError: The backend is chosen explicitly, and does not run on the device.
    """
    backend: Backend = "torch"
    if choice == "triton":
        if device.type != "cuda" and not interpreting():
            raise ValueError(f'backend="triton" is unavailable for tensors on {device.type}: a GPU is needed')
        backend = "triton"
    elif choice == "cpp":
        if device.type != "cpu":
            raise ValueError(f'backend="cpp" is unavailable for tensors on {device.type}; use backend="auto"')
        backend = "cpp"
    elif choice == "auto":
        fast: Backend = "triton" if device.type == "cuda" else "cpp" if device.type == "cpu" else "torch"
        backend = fast if all(codec.runs_on(fast) for codec in codecs) and _is_there(fast) else "torch"
    _log_once(backend, device.type)
    return backend


def _is_there(backend: Backend) -> bool:
    if backend == "cpp":
        return not _cpp_problem()
    return backend == "torch" or find_spec("triton") is not None


def _triton_problem() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available() and not interpreting():
        return "there is no GPU (and TRITON_INTERPRET=1 is not set)"
    return None


@cache
def _cpp_problem() -> str | None:
    """Compile the C++ code if it has not been, and return the reason if it is unavailable."""
    problem: str | None = load_part("cpu_kernels.build").problem()
    if problem:
        logger.warning("no C++ code on CPUs, which makes compressed caches slower: %s", problem)
    return problem


def on_device(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Context in which codecs and attention run: the device of `x` is current, and autocast is off.

    Triton launches on the current device, and autocast would do float32 arithmetic in 16 bits.
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


@cache
def load_part(name: str) -> Any:
    """Import a module of this package at its first use, such as `triton_kernels.attention.launch`."""
    return importlib.import_module(f"kvcache_compress.{name}")


def quantizer(backend: Backend, twin: Callable[..., _Encoded], cpp: str) -> Callable[..., _Encoded]:
    """Return the torch function `twin`, or for C++ the function `cpp` of `cpu_kernels/encode/launch.py`."""
    found: Callable[..., _Encoded] = twin
    if backend == "cpp":
        found = getattr(load_part("cpu_kernels.encode.launch"), cpp)
    return found


@cache
def _log_once(backend: str, device: str) -> None:
    logger.info("packed cache on %s runs on the %s backend", device, backend)
