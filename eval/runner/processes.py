"""One process or several, as `accelerate launch` or `torchrun` start them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

PATIENCE = timedelta(days=7)
"""How long a process waits for the slowest: a sample more may take an hour where the caches are many."""


class Processes(Protocol):
    """Those that run the same calls."""

    index: int
    count: int
    device: torch.device

    def gather(self, item: Any) -> list[Any]:
        """What each gives, in order; waits for all."""


class OneProcess:
    """The usual case."""

    index = 0
    count = 1
    device = torch.device("cpu")

    def gather(self, item: Any) -> list[Any]:
        return [item]


class LaunchedProcesses:
    """This process among those that were started together; alone if it was not."""

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
        self.index: int = self._state.process_index
        self.count: int = self._state.num_processes
        self.device: torch.device = self._state.device

    def gather(self, item: Any) -> list[Any]:
        return list(gather_object([item])) if self.count > 1 else [item]

    def close(self) -> None:
        self._state.destroy_process_group()
