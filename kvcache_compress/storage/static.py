"""Storage of a static layer: decode steps with static shapes that never wait for the device (CUDA graphs).

Codes are those of a growing layer, at the same steps, but the counts are tensors and the tail is circular. Without a
kernel encoder each step encodes as many tokens as it adds, which still become packed `Windows.flush` at a time.
"""

import copy

import torch

from kvcache_compress.codecs.base import Side

from .checks import full_error, not_packable_error
from .dynamic import DynamicStorage
from .shared.slots import Slots
from .side import MAX_DECODE_TOKENS, SideState
from .step_buffers import FULL, StepBuffers
from .view import View


class StaticStorage:
    """`sinks | packed | tail` of keys and values, with counters on the device.

    All operations except steps read the tokens into a `DynamicStorage`, change them there and load them into a new
    `StaticStorage`. Reading (`sides`, `tokens`, `as_dynamic`) waits for the device and raises the errors of earlier
    steps, which cannot raise on a GPU themselves.

    It takes over a `dynamic` storage that `is_loadable`, and reuses the previous one's `buffers` if they fit.
    """

    def __init__(self, dynamic: DynamicStorage, buffers: StepBuffers | None = None) -> None:
        assert self.is_loadable(dynamic)
        self.windows, self.backend = dynamic.windows, dynamic.backend
        empty, packed = dynamic.empty, dynamic.packed_tokens
        # Tokens between the recent window and the packed ones are encoded now, except by kernel encoders, which encode
        # them in the step that packs them.
        for state in dynamic.sides.values():
            group = state.codec.group
            early = max(0, state.tail.tokens - self.windows.recent) // group * group
            if early and not self.backend.encodes_in_steps(state.codec):
                self.backend.pack(state, state.tail.view(), early, growing=False)
                state.store.truncate(packed)
        if buffers is None or not buffers.fits(dynamic.sides):
            with torch.inference_mode(False):
                buffers = StepBuffers(dynamic.sides, self.windows)
        for side, state in dynamic.sides.items():
            buffers.load(side, state, packed)
        self.buffers, self._carrier = buffers, dynamic
        """`_carrier` holds codecs and packed stores. Its dense tokens and counts are stale; `buffers` has the current
        ones."""
        if all(state.prepared for state in dynamic.sides.values()):
            self.backend.ready(dynamic.sides)
        self.empty = empty
        """True if there are no tokens; the host knows this without waiting."""
        self._rows = rows = dynamic.sides["keys"].padding.rows
        self._lacking = 0 if rows is None else rows.longest + self.windows.sinks - dynamic.tokens
        """Tokens still to come until every left-padded row has its sinks; zero or less if all have them."""

    @staticmethod
    def is_loadable(dynamic: DynamicStorage) -> bool:
        """True if codecs have their statistics and the tail fits; the tail always fits after a step."""
        windows = dynamic.windows
        return (
            windows.capacity is not None
            and dynamic.sides["keys"].tail.tokens <= windows.tail_capacity
            and all(state.prepared or not state.codec.least_tokens() for state in dynamic.sides.values())
        )

    @property
    def sides(self) -> dict[Side, SideState]:
        """Copies of the two sides with their current tokens; they share the packed buffers."""
        return self.as_dynamic().sides

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        checks = self._carrier.checks
        checks.raise_for_known()
        if fault := int(self.buffers.fault.amax()):
            full = full_error(checks.layer, self.buffers.capacity)
            raise full if fault == FULL else not_packable_error("keys or values", checks.layer)
        return int(self.buffers.length)

    @property
    def packed_tokens(self) -> int:
        return int(self.buffers.packed)

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        return (*self.buffers.sinks.values(), *self.buffers.tail.values())

    def views(self) -> tuple[View, View]:
        """Views of all slots, whether they hold a token or not."""
        windows, buffers = self.windows, self.buffers
        slots = Slots(
            windows.sinks, windows.packed_capacity, windows.tail_capacity, buffers.capacity, buffers.length,
            buffers.packed, buffers.rows,
        )  # fmt: skip
        keys, values = (
            View(
                buffers.sinks[side], state.store, windows.packed_capacity, buffers.tail[side], windows.tail_capacity,
                state.eras, state.track, slots, state.padding.rows, self.backend, windows.capacity,
            )
            for side, state in self._carrier.sides.items()
        )  # fmt: skip
        return keys, values

    @property
    def dense_like(self) -> dict[Side, torch.Tensor]:
        """One dense tensor per side, for its shape, dtype and device."""
        return self.buffers.sinks

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None
    ) -> tuple[View, View]:
        """Append a step's tokens, as `DynamicStorage.append` does, and return views of all slots."""
        carrier = self._carrier
        if carrier.track is not None:
            positions = torch.arange(keys.shape[2], device=keys.device) + self.buffers.length
            carrier.track.write(positions, keys, already_written=not carrier.leads_track)
        fresh: dict[Side, torch.Tensor] = {"keys": keys, "values": values}
        if self._rows is not None and self._lacking > 0:
            self._lacking -= keys.shape[2]
            self.buffers.exchange_new_sinks(self._rows, fresh)
        self.backend.step(self.buffers, carrier.sides, fresh, counter)
        return self.views()

    def is_step(self, count: int) -> bool:
        """Return True if `count` new tokens can be a step of static shapes.

        The first tokens cannot, nor can tokens whose mask showed more of the rows' padding.
        """
        as_known = self._carrier.sides["keys"].padding.rows is self._rows
        return not self.empty and 0 < count <= MAX_DECODE_TOKENS and as_known

    def as_dynamic(self) -> DynamicStorage:
        """Return the tokens as a `DynamicStorage`; changing it leaves this storage as it is."""
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
            dynamic.track.tokens = length  # steps do not update it
        return dynamic
