"""Safetensors files: written completely or not at all, and opened with errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .atomic import whole_file


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors to a safetensors file, atomically; see `whole_file`.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        with whole_file(path) as unfinished:
            save_file(dict(tensors), unfinished, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} could not be written: {error}") from None


@contextmanager
def open_tensors(path: str | Path, what: str) -> Iterator[Any]:
    """Open a safetensors file for reading, as `safetensors.safe_open` does.

    Raises:
        ValueError: The file is damaged, cut short, not a safetensors file or not readable; messages begin with `what`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{what}: damaged, or no safetensors file: {error}") from None
    except OSError as error:
        raise ValueError(f"{what}: {str(path)!r} cannot be read: {error}") from None
