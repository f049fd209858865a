"""What Transformers does to the rows of a cache layer and to the place of its buffers: one change of all of them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from kvcache_compress.codecs.base import Side
from kvcache_compress.storage.side import SideState


class RowOperations(CacheLayerMixin):
    """Beams, batch selection and moves between devices, each by `_apply` of a function of a tensor `[B, ...]`."""

    device: torch.device

    @property
    @abstractmethod
    def sides(self) -> dict[Side, SideState]:
        """The two sides; empty before the first update."""

    @abstractmethod
    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every buffer by `change(buffer)`."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i of the batch becomes what row `beam_idx[i]` was."""
        self._apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch `repeats` times."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows of the batch that `indices` (integers or a boolean mask) selects."""
        self._apply(lambda x: x[indices.to(x.device) if isinstance(indices, torch.Tensor) else indices])

    def offload(self) -> None:
        """Moves all buffers to the CPU; what a step handed out stays where it is."""
        for state in self.sides.values():
            state.store = copy.copy(state.store)
        self._apply(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Moves offloaded buffers back to the layer's device."""
        if self.is_initialized:
            self._apply(lambda x: x.to(self.device, non_blocking=True))
