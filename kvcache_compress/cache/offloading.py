"""Offloading: layers stay on the CPU, packed as they are, while other layers run.

The layer that runs and the next one are on their device. The next one is copied while the layer before it runs, on a
stream of its own as in `transformers.Cache(offloading=True)`, but with one stream per device and none for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .layer import CompressedLayer


class Offloading:
    """Move a cache's full-attention layers between CPU and device; sliding and linear layers stay on their device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloading:
        return Offloading()

    @contextmanager
    def at_work(self, layers: Sequence[Any], index: int) -> Iterator[None]:
        """Keep layer `index` on its device within the block and move it to the CPU after it; prefetch the next one."""
        layer = layers[index]
        if not _moves(layer):
            yield
            return
        if layer.is_initialized and layer.device in self._streams:
            torch.accelerator.current_stream(layer.device).wait_stream(self._streams[layer.device])
        layer.prefetch()
        following = [*layers[index + 1 :], *layers[: index + 1]]
        self._start(next(other for other in following if _moves(other)))
        yield
        layer.offload()

    def _start(self, layer: Any) -> None:
        """Copy a layer to its device without waiting for it."""
        if not layer.is_initialized or layer.device.type == "cpu":
            return
        if layer.device not in self._streams:
            self._streams[layer.device] = torch.Stream(layer.device)
        stream = self._streams[layer.device]
        # The layer's last copy to the CPU must be complete, and running work may still read the memory it had.
        stream.wait_stream(torch.accelerator.current_stream(layer.device))
        with stream:
            layer.prefetch()

    def settle(self) -> None:
        """Wait until all copies have arrived, before the CPU reads them."""
        for device in self._streams:
            torch.accelerator.synchronize(device)


def _moves(layer: Any) -> bool:
    return isinstance(layer, CompressedLayer) or type(layer) is DynamicLayer
