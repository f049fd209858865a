"""Batch operations of a cache layer and moves between devices, each as one change of all buffers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin


class RowOperations(CacheLayerMixin):
    """Beam reordering, batch selection and moves between devices; each maps `_apply` over buffers `[B, ...]`."""

    device: torch.device

    @abstractmethod
    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer by `change(buffer)`."""

    @abstractmethod
    def release_views(self) -> None:
        """Copy the content of views that are still in use, before the layer changes."""

    def _select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.release_views()
        self._apply(change)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace row i of the batch by row `beam_idx[i]`."""
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        self._select(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` (integers or a boolean mask) selects."""
        self._select(lambda x: x[indices.to(x.device) if isinstance(indices, torch.Tensor) else indices])

    def offload(self) -> None:
        """Move all buffers to the CPU; views that a step returned stay on the device."""
        self._apply(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move offloaded buffers back to the layer's device."""
        if self.is_initialized:
            self._apply(lambda x: x.to(self.device, non_blocking=True))
