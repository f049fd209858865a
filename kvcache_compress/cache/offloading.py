"""Offloading: layers stay on the CPU, packed as they are, while other layers run.

The running layer and the next one are on their device. The next layer is copied while the layer before it runs, on a
stream of its own. `transformers.Cache(offloading=True)` does the same; here each device has a stream, and the CPU none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .layer import CompressedLayer


class Offloading:
    """Moves a cache's full-attention layers between CPU and device; sliding and linear layers stay on their device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offloading":
        return Offloading()

    @contextmanager
    def at_work(self, layers: Sequence[Any], index: int) -> Iterator[None]:
        """Keep layer `index` on its device in the block, then move it to the CPU; prefetch the next layer meanwhile."""
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
        if not layer.is_initialized or layer.device.type == "cpu":
            return
        if layer.device not in self._streams:
            self._streams[layer.device] = torch.Stream(layer.device)
        stream = self._streams[layer.device]
        # Wait for the layer's copy to the CPU, and for running work that may still read the memory it had.
        stream.wait_stream(torch.accelerator.current_stream(layer.device))
        with stream:
            layer.prefetch()

    def synchronize(self) -> None:
        """Wait until all copies have arrived, before the CPU reads them."""
        for device in self._streams:
            torch.accelerator.synchronize(device)


def _moves(layer: Any) -> bool:
    return isinstance(layer, CompressedLayer) or type(layer) is DynamicLayer
