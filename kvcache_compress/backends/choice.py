"""Choose a layer's back end by name, device and codecs."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.storage.backend import Backend

from .cpp import CppBackend
from .torch import TorchBackend
from .triton import TritonBackend

_log_once = cache(logging.getLogger(__name__).info)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TritonBackend(), CppBackend(), TorchBackend())}
"""Back ends by name in order of preference; the last one runs everywhere."""


def check_backend(choice: str, codecs: Iterable[tuple[type[Codec], Any, Side]]) -> None:
    """Raise `ValueError` if a back end chosen by name cannot run here or does not support one of the codecs."""
    if choice == "auto":
        return
    backend = BACKENDS[choice]
    for codec, options, side in codecs:
        if not backend.supports(codec, options, side):
            raise ValueError(
                f'backend="{choice}" is unavailable for method {codec.name!r}; use backend="torch" or "auto"'
            )
    if problem := backend.problem():
        raise ValueError(f'backend="{choice}" is unavailable: {problem}; use backend="torch" or "auto"')


def resolve_backend(choice: str, device: torch.device, codecs: Iterable[tuple[type[Codec], Any, Side]] = ()) -> Backend:
    """Return the back end of a layer on `device`; `auto` is the first that supports the device and all codecs."""
    if choice != "auto":
        backend = BACKENDS[choice]
        if not backend.runs_on(device, asked=True):
            raise ValueError(f'backend="{choice}" is unavailable for tensors on {device.type}; use backend="auto"')
    else:
        needed = list(codecs)
        backend = next(
            one
            for one in BACKENDS.values()
            if one.runs_on(device) and all(one.supports(*codec) for codec in needed) and not one.problem()
        )
    _log_once("compressed caches on %s use the %s back end", device.type, backend.name)
    return backend
