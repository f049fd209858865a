"""Processes of an evaluation: one, or several started by `accelerate launch` or `torchrun`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

PATIENCE = timedelta(days=7)
"""Timeout for the slowest process: with many caches, one more sample may take an hour."""


class Processes(Protocol):
    """A group of processes that all make the same calls."""

    index: int
    count: int
    device: torch.device

    def gather(self, item: Any) -> list[Any]:
        """Gather one item from each process, in order; waits for all."""


class OneProcess:
    """A single process."""

    index = 0
    count = 1
    device = torch.device("cpu")

    def gather(self, item: Any) -> list[Any]:
        return [item]


class LaunchedProcesses:
    """The processes that a launcher started together; this one alone without a launcher."""

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
        self.index: int = self._state.process_index
        self.count: int = self._state.num_processes
        self.device: torch.device = self._state.device

    def gather(self, item: Any) -> list[Any]:
        return list(gather_object([item])) if self.count > 1 else [item]

    def close(self) -> None:
        self._state.destroy_process_group()
