"""Storage of a static layer, whose decode steps have static shapes and never wait for the device: for CUDA graphs.

Tokens are `sinks | packed | tail` as in a growing layer, with the same codes at the same steps. But the token counts
are tensors and the tail is circular. Without a kernel encoder each step encodes as many tokens as it adds, so that no
step costs more than another; they count as packed `Windows.flush` at a time, when a growing layer would encode them. A
kernel encoder encodes a whole block in the step from which on it counts as packed.

On CPUs, which have no graphs and nothing to wait for, a static layer has a `DynamicStorage` with a capacity.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from kvcache_compress.codecs.backend import load_part, on_device
from kvcache_compress.codecs.base import Backend, Side
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.modeling.rope import Rope

from .checks import LONGEST, full_error, longest, not_packable_error
from .dynamic import DynamicStorage
from .segments import SideSegments
from .side import MAX_DECODE_TOKENS, SideState, Windows, encoded, triton_encoder
from .slots import Slots

NOT_FINITE, FULL = 1, 2


class StepBuffers:
    """Dense tokens and counters of a layer, which its steps write in place.

    sinks, tail: `[B, H, sinks, D]` and `[B, H, tail_capacity + 1, D]` per side; the last row absorbs masked writes.
    length, packed: tokens and packed tokens, int64 `[]`.
    fault: `[2 B H]`, `NOT_FINITE` or `FULL` after an error, else 0.
    counts: `[3, 2 B H]`, the memory of the three counters, with a column for each program of a kernel.
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
        self._view_counts()

    def _view_counts(self) -> None:
        self.length, self.packed, self.fault = self.counts[0, 0], self.counts[1, 0], self.counts[2]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the views anew, which pickling turns into copies."""
        self.__dict__.update(state)
        self._view_counts()

    def fits(self, sides: Mapping[Side, SideState]) -> bool:
        """Return True if these sides have the buffers' batch, device and dtypes."""
        held = {side: state.sinks for side, state in sides.items()}
        return all(
            (x.shape[0], x.device, x.dtype) == (held[side].shape[0], held[side].device, held[side].dtype)
            for side, x in self.tail.items()
        )

    def load(self, side: Side, state: SideState, packed: int) -> None:
        """Copy sinks and tail of a side that has `packed` packed tokens."""
        sinks, tail = state.sinks.shape[2], state.tail.tokens
        self.sinks[side][:, :, :sinks] = state.sinks
        self.tail[side].index_copy_(2, self.slots(packed, packed + tail), state.tail.view())
        state.sinks = self.sinks[side][:, :, :sinks]
        state.tail.clear()
        self.counts[0].fill_(sinks + packed + tail)
        self.counts[1].fill_(packed)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Return the tail's slots of tokens `[start, stop)`, counted after the sinks."""
        return (torch.arange(start, stop) % self.windows.tail_capacity).to(self.counts.device)

    def check(self, fresh: Mapping[Side, torch.Tensor]) -> torch.Tensor:
        """Return the fault of a step's tokens, int64 `[]`, or 0."""
        good = torch.stack([longest(x) for x in fresh.values()]).amax() <= LONGEST
        fault = torch.where(good, 0, NOT_FINITE)
        return torch.where(self.length + fresh["keys"].shape[2] > self.capacity, FULL, fault)

    def step(
        self,
        sides: Mapping[Side, SideState],
        fresh: Mapping[Side, torch.Tensor],
        counter: torch.Tensor | None,
    ) -> None:
        """Write n tokens, and encode the groups that become complete as n tokens leave the recent window.

        With a kernel encoder, Triton encodes them only in the step from which on they count as packed. Every shape
        depends on n alone, and no value is read back. `counter`, int64 `[]`, receives the number of tokens.
        """
        if sides["keys"].codec.backend == "triton":
            self._step_in_triton(sides, fresh, counter)
            return
        windows, count = self.windows, fresh["keys"].shape[2]
        self.fault.copy_(torch.maximum(self.fault, self.check(fresh)))
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
        for side, state in sides.items():
            x, groups = self._leaving(side, state.codec.group, count)
            state.store.write(groups, encoded(state.codec, x, self._rope(state, count)), state.codec.group)

    def settle(self, padding: LeftPadding, fresh: dict[Side, torch.Tensor]) -> None:
        """Let new tokens that are sinks of left-padded rows change places with the padding there."""
        for side, x in fresh.items():
            sinks, fresh[side] = padding.settle(self.sinks[side], x, self.length, self.windows.sinks)
            self.sinks[side].copy_(sinks)

    def _write_sinks(self, sinks: torch.Tensor, x: torch.Tensor) -> None:
        """Write those new tokens that are sinks, gathered by sink to keep shapes static."""
        count = x.shape[2]
        age = torch.arange(sinks.shape[2], device=sinks.device) - self.length
        new = (age >= 0) & (age < count)
        sinks.copy_(torch.where(new[:, None], x.index_select(2, age.clamp(0, count - 1)), sinks))

    def _leaving(self, side: Side, group: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the groups that `count` tokens may complete, and the indices of these groups.

        A group that is not complete gets the index after the last group's, where nothing is read.
        """
        windows = self.windows
        stop, groups = self._groups(group, count)
        new = (groups * group >= self.packed) & ((groups + 1) * group > stop - count)
        new &= (groups >= 0) & ((groups + 1) * group <= windows.packed_capacity)
        x = self.tail[side].index_select(2, _tokens(groups, group) % windows.tail_capacity)
        return x, torch.where(new, groups, windows.packed_capacity // group)

    def _rope(self, state: SideState, count: int) -> Rope | None:
        if state.track is None:
            return None
        _, groups = self._groups(state.codec.group, count)
        return state.track.gather(groups)

    def _groups(self, group: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of tokens between sinks and recent window, and the groups that `count` may complete."""
        stop = self.length - self.windows.sinks - self.windows.recent
        return stop, stop // group - torch.arange((count - 1) // group + 1, device=stop.device) - 1

    def _step_in_triton(
        self, sides: Mapping[Side, SideState], fresh: Mapping[Side, torch.Tensor], counter: torch.Tensor | None
    ) -> None:
        """Do a `step` in one kernel, plus one that writes the groups of sides without a kernel encoder."""
        kernels, windows = load_part("triton_kernels.update.write_slots"), self.windows
        states, count = list(sides.values()), fresh["keys"].shape[2]
        with on_device(self.counts):
            leaving = kernels.write_slots(
                list(fresh.values()), list(self.sinks.values()), list(self.tail.values()),
                [state.codec.group for state in states], [triton_encoder(state.codec) for state in states],
                [state.store.buffers for state in states], self.counts, counter,
                recent=windows.recent, flush=windows.flush, capacity=self.capacity,
                packed_capacity=windows.packed_capacity, longest=LONGEST, rope=sides["keys"].rope_rows,
            )  # fmt: skip
            left = [(state, *copied) for state, copied in zip(states, leaving, strict=True) if copied is not None]
            if left:
                kernels.store_groups(
                    [encoded(state.codec, x, self._rope(state, count)) for state, x, _ in left],
                    [state.store.buffers for state, _, _ in left],
                    [groups for _, _, groups in left],
                    [state.store.capacity // state.codec.group for state, _, _ in left],
                )


def _tokens(groups: torch.Tensor, group: int) -> torch.Tensor:
    return (groups[:, None] * group + torch.arange(group, device=groups.device)).flatten()


def has_static_steps(backend: Backend, device: torch.device) -> bool:
    """Return True if steps have static shapes: on CPUs only in Triton's interpreter, which stands in for a GPU."""
    return backend == "triton" or device.type != "cpu"


class StaticStorage:
    """`sinks | packed | tail` of keys and values, with counters on the device.

    All operations but a step read the tokens into a `DynamicStorage`, change them there and load them
    into a new `StaticStorage`. Reading (`sides`, `tokens`, `as_dynamic`) waits for the device and raises the errors of
    earlier steps, which on a GPU cannot raise themselves.

    Args:
        dynamic: a storage that `is_loadable`, whose tokens and buffers this one takes over.
        buffers: buffers of the storage that this one replaces; they are used again if they fit.
    """

    waiting = False
    """False: its codecs have their statistics."""

    def __init__(self, dynamic: DynamicStorage, buffers: StepBuffers | None = None) -> None:
        assert self.is_loadable(dynamic)
        self.windows = dynamic.windows
        self._load(dynamic, buffers)

    @staticmethod
    def is_loadable(dynamic: DynamicStorage) -> bool:
        """True if codecs have their statistics and the tail fits, as it always does after a step."""
        windows = dynamic.windows
        return (
            windows.capacity is not None
            and dynamic.sides["keys"].tail.tokens <= windows.tail_capacity
            and not dynamic.lacks_queries()
        )

    @torch.inference_mode(False)
    def _new_buffers(self, dynamic: DynamicStorage) -> StepBuffers:
        return StepBuffers(dynamic.sides, self.windows)

    @property
    def sides(self) -> dict[Side, SideState]:
        """Copies of the two sides as they are now, which share the packed buffers."""
        return self.as_dynamic().sides

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        self._raise_for_faults()
        return int(self.buffers.length)

    @property
    def packed_tokens(self) -> int:
        return int(self.buffers.packed)

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        """The dense buffers of both sides with their spare capacity, as in `DynamicStorage`."""
        return (*self.buffers.sinks.values(), *self.buffers.tail.values())

    def segments(self) -> tuple[SideSegments, SideSegments]:
        """Return all slots of both sides, whether they hold a token or not."""
        windows, buffers = self.windows, self.buffers
        slots = Slots(
            windows.sinks,
            windows.packed_capacity,
            windows.tail_capacity,
            buffers.capacity,
            buffers.length,
            buffers.packed,
        )
        keys, values = (
            SideSegments(
                buffers.sinks[side], state.store, windows.packed_capacity, buffers.tail[side], windows.tail_capacity,
                state.codec, state.track, slots, state.padding.rows,
            )
            for side, state in self._carrier.sides.items()
        )  # fmt: skip
        return keys, values

    @property
    def dense_parts(self) -> dict[Side, torch.Tensor]:
        """A dense tensor of each side, to read shape, dtype and device from."""
        return self.buffers.sinks

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None
    ) -> tuple[SideSegments, SideSegments]:
        """Append the tokens of a step, as `DynamicStorage.append` does, and return all slots."""
        carrier = self._carrier
        if carrier.track is not None:
            positions = torch.arange(keys.shape[2], device=keys.device) + self.buffers.length
            carrier.track.write(positions, keys, again=not carrier.leads_track)
        fresh: dict[Side, torch.Tensor] = {"keys": keys, "values": values}
        if self._rows is not None and self._lacking > 0:
            self._lacking -= keys.shape[2]
            self.buffers.settle(self._rows, fresh)
        self.buffers.step(carrier.sides, fresh, counter)
        return self.segments()

    def is_step(self, count: int) -> bool:
        """Return True if `count` new tokens are a step of static shapes.

        The first tokens never are, nor are those with which more becomes known of the rows' padding.
        """
        as_known = self._carrier.sides["keys"].padding.rows is self._rows
        return not self.empty and 0 < count <= MAX_DECODE_TOKENS and as_known

    def as_dynamic(self) -> DynamicStorage:
        """Return the tokens as a `DynamicStorage`, whose changes leave this storage as it is."""
        buffers = self.buffers
        length, packed = self.tokens, self.packed_tokens
        sinks = min(length, self.windows.sinks)
        slots = buffers.slots(packed, length - sinks)
        dynamic = copy.copy(self._carrier)
        dynamic.sides = {}
        for side, state in self._carrier.sides.items():
            dynamic.sides[side] = twin = copy.copy(state)
            twin.sinks = buffers.sinks[side][:, :, :sinks]
            twin.store, twin.tail = copy.copy(state.store), copy.copy(state.tail)
            twin.store.truncate(packed)
            twin.tail.replace(buffers.tail[side].index_select(2, slots))
        if dynamic.track is not None and dynamic.leads_track:
            dynamic.track.tokens = length  # which steps do not count
        return dynamic

    def _load(self, dynamic: DynamicStorage, buffers: StepBuffers | None) -> None:
        """Load tokens, and encode those that have left the recent window but are not packed yet.

        Kernel encoders do the latter from the tail, in the step that packs them.
        """
        empty, packed = dynamic.empty, dynamic.packed_tokens
        for state in dynamic.sides.values():
            group = state.codec.group
            early = max(0, state.tail.tokens - self.windows.recent) // group * group
            if early and not triton_encoder(state.codec):
                state.flush(state.tail.view(), early, growing=False)
                state.store.truncate(packed)
        if buffers is None or not buffers.fits(dynamic.sides):
            buffers = self._new_buffers(dynamic)
        for side, state in dynamic.sides.items():
            buffers.load(side, state, packed)
        self.buffers, self._carrier = buffers, dynamic
        """Codecs and packed stores; its dense tokens and counts are out of date, as `buffers` has them."""
        self.empty = empty
        """True while there are no tokens: the host can tell this without waiting."""
        self._rows = rows = dynamic.sides["keys"].padding.rows
        self._lacking = 0 if rows is None else rows.longest + self.windows.sinks - dynamic.tokens
        """Tokens until every left-padded row has its sinks, which steps bring then; none if it is not positive."""

    def _raise_for_faults(self) -> None:
        checks = self._carrier.checks
        checks.raise_for_known()
        if not (fault := int(self.buffers.fault.amax())):
            return
        if fault == FULL:
            raise full_error(checks.layer, self.buffers.capacity)
        raise not_packable_error("keys or values", checks.layer)
