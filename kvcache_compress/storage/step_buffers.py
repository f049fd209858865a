"""Dense tokens and counters of a static layer, and its step in plain PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.padding import LeftPadding

from .checks import LONGEST, longest
from .shared.slots import slot_rows
from .side import SideState, Windows

NOT_FINITE, FULL = 1, 2


class StepBuffers:
    """Dense tokens and counters of a layer, which its steps write in place.

    Attributes:
        sinks: `[B, H, sinks, D]` per side.
        tail: `[B, H, tail_capacity + 1, D]` per side; the last row absorbs masked writes.
        length, packed: numbers of tokens and of packed tokens, int64 `[]`.
        fault: `[2 B H]`, `NOT_FINITE` or `FULL` after an error, else 0.
        rows: `Slots.rows`, which the step's kernel writes too.
        counts: `[3, 2 B H]`, the memory of the three counters, with a column per kernel program.
    """

    def __init__(self, sides: Mapping[Side, SideState], windows: Windows) -> None:
        assert windows.capacity is not None
        self.windows, self.capacity = windows, windows.capacity
        self.sinks: dict[Side, torch.Tensor] = {}
        self.tail: dict[Side, torch.Tensor] = {}
        for side, state in sides.items():
            batch, heads, _, dim = state.sinks.shape
            self.sinks[side] = state.sinks.new_zeros(batch, heads, windows.sinks, dim)
            self.tail[side] = state.sinks.new_zeros(batch, heads, windows.tail_capacity + 1, dim)
        device = sides["keys"].sinks.device
        self.counts = torch.zeros(3, 2 * batch * heads, dtype=torch.int64, device=device)
        self.rows = slot_rows(batch, 0, 0, 0, device)
        self._view_counts()

    def _view_counts(self) -> None:
        self.length, self.packed, self.fault = self.counts[0, 0], self.counts[1, 0], self.counts[2]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the views of `counts`, which pickling turns into copies."""
        self.__dict__.update(state)
        self._view_counts()

    def fits(self, sides: Mapping[Side, SideState]) -> bool:
        """Return True if these sides have the buffers' batch, device and dtypes."""
        pairs = ((x, sides[side].sinks) for side, x in self.tail.items())
        return all((x.shape[0], x.device, x.dtype) == (y.shape[0], y.device, y.dtype) for x, y in pairs)

    def load(self, side: Side, state: SideState, packed: int) -> None:
        """Copy the sinks and the tail of a side that has `packed` packed tokens."""
        sinks, tail = state.sinks.shape[2], state.tail.tokens
        self.sinks[side][:, :, :sinks] = state.sinks
        self.tail[side].index_copy_(2, self.slots(packed, packed + tail), state.tail.view())
        state.sinks = self.sinks[side][:, :, :sinks]
        state.tail.clear()
        self.counts[0].fill_(sinks + packed + tail)
        self.counts[1].fill_(packed)
        self.rows.copy_(slot_rows(len(self.rows), self.windows.sinks, sinks + packed + tail, packed))

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Return the tail slots of tokens `[start, stop)`, counted from the end of the sinks."""
        return (torch.arange(start, stop) % self.windows.tail_capacity).to(self.counts.device)

    def step(
        self, sides: Mapping[Side, SideState], fresh: Mapping[Side, torch.Tensor], counter: torch.Tensor | None
    ) -> None:
        """Write n tokens, and encode the groups that become complete as n tokens leave the recent window.

        All shapes depend only on n, and nothing is read back. `counter`, int64 `[]`, receives the number of tokens.
        """
        windows, count = self.windows, fresh["keys"].shape[2]
        good = torch.stack([longest(x) for x in fresh.values()]).amax() <= LONGEST
        fault = torch.where(self.length + count > self.capacity, FULL, torch.where(good, 0, NOT_FINITE))
        self.fault.copy_(torch.maximum(self.fault, fault))
        positions = torch.arange(count, device=self.length.device) + self.length
        tail_slots = torch.where(
            positions < windows.sinks, windows.tail_capacity, (positions - windows.sinks) % windows.tail_capacity
        )
        for side, x in fresh.items():
            self._write_sinks(self.sinks[side], x)
            self.tail[side].index_copy_(2, tail_slots, x)
        waiting = self.length - windows.sinks - self.packed - windows.recent
        self.packed.add_(waiting.clamp_min(0) // windows.flush * windows.flush)
        self.length.add_(count)
        if counter is not None:
            counter.copy_(self.length)
        self.encode(sides, count)

    def encode(self, sides: Mapping[Side, SideState], count: int) -> None:
        """Encode the groups completed by the `count` tokens, already counted, that just left the recent window."""
        for side, state in sides.items():
            group = state.codec.group
            x, groups = self._leaving(side, group, count)
            rope = None if state.track is None else state.track.gather(self._groups(group, count)[1])
            state.store.write(groups, state.codec.encode(x, rope), group)

    def exchange_new_sinks(self, padding: LeftPadding, fresh: dict[Side, torch.Tensor]) -> None:
        """In left-padded rows, exchange padding held as sinks with the new tokens that belong there."""
        for side, x in fresh.items():
            sinks, fresh[side] = padding.exchange_new(self.sinks[side], x, self.length, self.windows.sinks)
            self.sinks[side].copy_(sinks)

    def _write_sinks(self, sinks: torch.Tensor, x: torch.Tensor) -> None:
        """Write the new tokens that are sinks; a gather per sink keeps shapes static."""
        count = x.shape[2]
        age = torch.arange(sinks.shape[2], device=sinks.device) - self.length
        new = (age >= 0) & (age < count)
        sinks.copy_(torch.where(new[:, None], x.index_select(2, age.clamp(0, count - 1)), sinks))

    def _leaving(self, side: Side, group: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the groups that `count` tokens may complete, and the indices of these groups.

        Incomplete groups get the index after the last group, where nothing is read.
        """
        windows = self.windows
        stop, groups = self._groups(group, count)
        first = groups * group
        least = torch.maximum(self.packed, stop - (count + group - 1)).clamp_min(0)
        new = (first >= least) & (first <= windows.packed_capacity - group)
        tokens = (first[:, None] + torch.arange(group, device=first.device)).flatten()
        x = self.tail[side].index_select(2, tokens % windows.tail_capacity)
        return x, torch.where(new, groups, windows.packed_capacity // group)

    def _groups(self, group: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token count between sinks and recent window, and the groups that `count` tokens may complete."""
        stop = self.length - (self.windows.sinks + self.windows.recent)
        return stop, stop // group - torch.arange(1, (count - 1) // group + 2, device=stop.device)
