"""Refusing what cannot be packed without making a GPU wait."""

from __future__ import annotations

import torch

from .codec import Side

LONGEST = torch.finfo(torch.float16).max
"""Longest vector that can be packed: norms and scales are stored in 16 bits."""


class PackableChecks:
    """Checks of vectors that are about to be packed in one layer.

    On the CPU a check raises at once. On a GPU its result is read when it has arrived, by a later `raise_for_known`.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._under_way: list[tuple[Side, torch.Tensor, torch.cuda.Event]] = []

    def add(self, side: Side, x: torch.Tensor) -> None:
        """Checks vectors `[..., D]` for NaN, infinity and lengths that 16 bits cannot hold."""
        # NaN fails the comparison too.
        good = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() <= LONGEST
        if x.device.type == "cpu":
            self._raise_unless(bool(good), side)
            return
        on_host = torch.ones((), dtype=torch.bool, pin_memory=True)
        on_host.copy_(good, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x.device))
        self._under_way.append((side, on_host, event))

    def raise_for_known(self) -> None:
        """Raises for the checks whose results have arrived; waits for none."""
        while self._under_way and self._under_way[0][2].query():
            side, good, _ = self._under_way.pop(0)
            self._raise_unless(bool(good), side)

    def _raise_unless(self, good: bool, side: Side) -> None:
        if not good:
            raise ValueError(
                f"{side} of layer {self.layer} hold NaN, infinity or vectors longer than {LONGEST:g}, which cannot be "
                "packed: is the model's dtype too narrow?"
            )
