"""Safetensors files of ours: written whole or not at all, and opened with errors that name them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes contiguous CPU tensors; an existing file is replaced only once all of the new one is on the disk.

    Folders that are missing are made. Nothing is left behind by an error, nor is the old file touched.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid4().hex}.unfinished")
    try:
        mode = _mode_of_new_file(unfinished)
        save_file(dict(tensors), unfinished, metadata=dict(metadata))
        unfinished.chmod(mode)
        _flush_to_disk(unfinished)
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} could not be written: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    _flush_to_disk(path.parent)


def _mode_of_new_file(path: Path) -> int:
    """Permissions of a file that is made here as usual, for safetensors makes its files for their owner alone."""
    path.touch()
    return path.stat().st_mode & 0o777


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def open_tensors(path: str | Path, what: str) -> Iterator[Any]:
    """The opened file, as `safetensors.safe_open` gives it.

    Raises:
        ValueError: damaged, cut short, no safetensors file, or not readable; the message begins with `what`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{what}: damaged, or no safetensors file: {error}") from None
    except OSError as error:
        raise ValueError(f"{what}: {str(path)!r} cannot be read: {error}") from None
