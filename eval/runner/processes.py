"""Processes of an evaluation: one, or several started by `accelerate launch` or `torchrun`."""

from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

PATIENCE = timedelta(days=7)
"""Timeout for the slowest process: with many caches, one more sample may take an hour."""


class OneProcess:
    """A single process; the base of a group of processes that all make the same calls."""

    index = 0
    count = 1
    device = torch.device("cpu")

    def gather(self, item: Any) -> list[Any]:
        """Gather an item from each process, in order; waits for all."""
        return [item]


class LaunchedProcesses(OneProcess):
    """The processes that a launcher started together, or this one alone without a launcher."""

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)
        self.index = self._state.process_index
        self.count = self._state.num_processes
        self.device = self._state.device

    def gather(self, item: Any) -> list[Any]:
        return list(gather_object([item]))

    def close(self) -> None:
        self._state.destroy_process_group()
