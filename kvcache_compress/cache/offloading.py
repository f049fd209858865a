"""Offloading: layers wait on the CPU, packed as they are, while others work.

The layer at work and the next one are on their device. The next one's way there overlaps with the work before it, on a
stream of its own, as in `transformers.Cache(offloading=True)`; but there is one stream per device, and none on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .layer import CompressedLayer


class Offloading:
    """Moves the full-attention layers of a cache; layers that do not grow, sliding or linear, stay where they are."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloading:
        return Offloading()

    @contextmanager
    def at_work(self, layers: Sequence[Any], index: int) -> Iterator[None]:
        """Has layer `index` on its device within the block, and on the CPU after it; the next is on its way."""
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
        """Sends a layer to its device, without waiting for it."""
        if not layer.is_initialized or layer.device.type == "cpu":
            return
        if layer.device not in self._streams:
            self._streams[layer.device] = torch.Stream(layer.device)
        stream = self._streams[layer.device]
        # What the layer's way to the CPU left there must be complete, and what is at work may still read its memory.
        stream.wait_stream(torch.accelerator.current_stream(layer.device))
        with stream:
            layer.prefetch()

    def settle(self) -> None:
        """Waits until all that is on its way has arrived, before the CPU reads it."""
        for device in self._streams:
            torch.accelerator.synchronize(device)


def _moves(layer: Any) -> bool:
    return isinstance(layer, CompressedLayer) or type(layer) is DynamicLayer
