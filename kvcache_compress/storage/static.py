"""Storage of a static layer: decode steps with static shapes that never wait for the device (CUDA graphs).

Codes are those of a growing layer, at the same steps, but the counts are tensors and the tail is circular.
"""

import copy
from collections.abc import Mapping

import torch

from kvcache_compress.codecs.base import Codec, Fields, Side
from kvcache_compress.modeling.rope import Rope

from .checks import LONGEST, full_error, longest, not_packable_error
from .dynamic import DynamicStorage
from .shared.rope_track import RopeTrack
from .shared.slots import Slots, slot_rows
from .side import MAX_DECODE_TOKENS, SideState
from .view import View

NOT_FINITE, FULL = 1, 2


class StaticStorage:
    """`sinks | packed | tail` of keys and values in buffers of fixed size, with counters on the device.

    All operations except steps read the tokens into a `DynamicStorage` and change them there; `load` takes them back.
    Reading (`sides`, `tokens`, `as_dynamic`) waits for the device and raises the errors of earlier steps, which cannot
    raise on a GPU themselves.

    Attributes:
        sinks: `[B, H, sinks, D]` per side.
        tails: `[B, H, tail_capacity, D]` per side.
        counts: a copy of `Slots.rows` for each program of a step's kernel, int64 `[B, 2 H, 4]`, so that no program
            overwrites numbers that another still reads.
        faults: int64 `[B, 2 H]`, by program too: `NOT_FINITE` or `FULL` after an error, else 0.
    """

    page = 0

    def __init__(self, dynamic: DynamicStorage) -> None:
        self.windows = dynamic.windows
        assert self.windows.capacity is not None
        self.capacity = self.windows.capacity
        self.sinks: dict[Side, torch.Tensor] = {}
        self.tails: dict[Side, torch.Tensor] = {}
        with torch.inference_mode(False):
            for side, state in dynamic.sides.items():
                batch, heads, _, dim = state.sinks.shape
                self.sinks[side] = state.sinks.new_zeros(batch, heads, self.windows.sinks, dim)
                self.tails[side] = state.sinks.new_zeros(batch, heads, self.windows.tail_capacity, dim)
            device = self.sinks["keys"].device
            self.counts = torch.zeros(batch, 2 * heads, 4, dtype=torch.int64, device=device)
            self.faults = torch.zeros(batch, 2 * heads, dtype=torch.int64, device=device)
        self.load(dynamic)

    @staticmethod
    def is_loadable(dynamic: DynamicStorage) -> bool:
        """True if codecs have their statistics and the tail fits; the tail always fits after a step."""
        return dynamic.sides["keys"].tail.tokens <= dynamic.windows.tail_capacity and all(
            state.prepared or not state.codec.least_tokens() for state in dynamic.sides.values()
        )

    def fits(self, dynamic: DynamicStorage) -> bool:
        """True if these tokens have the buffers' batch, device and dtypes, so that `load` can take them."""
        pairs = ((x, dynamic.sides[side].sinks) for side, x in self.tails.items())
        return all((x.shape[0], x.device, x.dtype) == (y.shape[0], y.device, y.dtype) for x, y in pairs)

    def load(self, dynamic: DynamicStorage) -> None:
        """Take over the tokens of a storage that `is_loadable` and `fits`."""
        assert self.is_loadable(dynamic)
        self.empty = dynamic.empty
        """True if there are no tokens; the host knows this without waiting."""
        self._rows = rows = dynamic.sides["keys"].padding.rows
        self._lacking = 0 if rows is None else rows.longest + self.windows.sinks - dynamic.tokens
        """Tokens still to come until every left-padded row has its sinks; zero or less if all have them."""
        length, packed = dynamic.tokens, dynamic.packed_tokens
        for side, state in dynamic.sides.items():
            sinks, tail = state.sinks.shape[2], state.tail.tokens
            self.sinks[side][:, :, :sinks] = state.sinks
            self.tails[side].index_copy_(2, self._slots(packed, packed + tail), state.tail.view())
            state.sinks = self.sinks[side][:, :, :sinks]
            state.tail.clear()
        self.counts.copy_(slot_rows(len(self.counts), self.windows.sinks, length, packed)[:, None])
        self.backend, self._carrier = dynamic.backend, dynamic
        """`_carrier` holds codecs and packed stores. Its dense tokens and counts are stale."""
        self.codecs: dict[Side, Codec] = {side: state.codec for side, state in dynamic.sides.items()}
        self.pools: dict[Side, Fields] = {side: state.store.buffers for side, state in dynamic.sides.items()}
        """Packed fields per side, `[B, H, capacity / field.tokens, *field.shape]`."""
        if all(state.prepared for state in dynamic.sides.values()):
            self.backend.ready(dynamic.sides)

    def _slots(self, start: int, stop: int) -> torch.Tensor:
        """Tail slots of tokens `[start, stop)`, counted from the end of the sinks."""
        return (torch.arange(start, stop) % self.windows.tail_capacity).to(self.counts.device)

    @property
    def rows(self) -> torch.Tensor:
        """`Slots.rows`."""
        return self.counts[:, 0]

    @property
    def track(self) -> RopeTrack | None:
        """cos and sin of the packed groups, if a codec needs them."""
        return self._carrier.track

    @property
    def rope_rows(self) -> torch.Tensor | None:
        """Those of each group's first token, `[B, capacity, 2 * rotary]`."""
        return None if self.track is None else self.track.buffer

    @property
    def sides(self) -> dict[Side, SideState]:
        """Copies of the two sides with their current tokens; they share the packed buffers."""
        return self.as_dynamic().sides

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        checks = self._carrier.checks
        checks.raise_for_known()
        if fault := int(self.faults.amax()):
            full = full_error(checks.layer, self.capacity)
            raise full if fault == FULL else not_packable_error("keys or values", checks.layer)
        return int(self.rows[0, 1:].sum())

    @property
    def packed_tokens(self) -> int:
        return int(self.rows[0, 2])

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        return (*self.sinks.values(), *self.tails.values())

    def views(self) -> tuple[View, View]:
        """Views of all slots, whether they hold a token or not."""
        packed, ring = self.windows.packed_capacity, self.windows.tail_capacity
        slots = Slots(self.windows.sinks, packed, ring, self.capacity, self.rows)
        keys, values = (
            View(
                self.sinks[side], state.store, packed, self.tails[side], ring, state.eras, state.track, slots,
                state.padding.rows, self.backend, self.capacity,
            )
            for side, state in self._carrier.sides.items()
        )  # fmt: skip
        return keys, values

    @property
    def dense_like(self) -> dict[Side, torch.Tensor]:
        """One dense tensor per side, for its shape, dtype and device."""
        return self.sinks

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None
    ) -> tuple[View, View]:
        """Append a step's tokens, as `DynamicStorage.append` does, and return views of all slots."""
        fresh: dict[Side, torch.Tensor] = {"keys": keys, "values": values}
        padding, rope = self._rows if self._lacking > 0 else None, None
        if self.track is not None:
            rope = self.track.of_step(self.rows[0, 1:], keys, already_written=not self._carrier.leads_track)
        if padding is not None:
            self._lacking -= keys.shape[2]
            length = self.rows[0, 1:].sum()
            for side, x in fresh.items():  # padding held as sinks makes room for the new tokens that belong there
                sinks, fresh[side] = padding.exchange_new(self.sinks[side], x, length, self.windows.sinks)
                self.sinks[side].copy_(sinks)
        self.backend.step(self, fresh, counter, rope)
        return self.views()

    def step(self, fresh: Mapping[Side, torch.Tensor], counter: torch.Tensor | None, rope: Rope | None) -> None:
        """Pack what leaves the recent window, then write n tokens `[B, H, n, D]`, with PyTorch's operators.

        All shapes depend only on n, and nothing is read back. `counter`, int64 `[]`, receives the number of tokens.
        `rope` is as `RopeTrack.of_step` returns it in the layer that writes the track, else None.
        """
        windows, count = self.windows, fresh["keys"].shape[2]
        if rope is not None and self.track is not None:
            self.track.write(torch.arange(count, device=self.counts.device) + self.rows[0, 1:].sum(), rope)
        good = torch.stack([longest(x) for x in fresh.values()]).amax() <= LONGEST
        is_full = self.rows[0, 1:].sum() + count > self.capacity
        self.faults.copy_(torch.maximum(self.faults, torch.where(is_full, FULL, torch.where(good, 0, NOT_FINITE))))
        self.pack(*fresh)
        _, sinks, packed, tail = self.rows[0].clone()
        age = torch.arange(windows.sinks, device=sinks.device) - sinks
        new = ((age >= 0) & (age < count))[:, None]
        # New sinks are written here too, to slots that are free as long as sinks are missing.
        tail_slots = torch.arange(count, device=sinks.device) + sinks - windows.sinks + packed + tail
        for side, x in fresh.items():
            held = self.sinks[side]
            held.copy_(torch.where(new, x.index_select(2, age.clamp(0, count - 1)), held))
            self.tails[side].index_copy_(2, tail_slots % windows.tail_capacity, x)
        new_sinks, leaving = (windows.sinks - sinks).clamp(max=count), windows.flush * self._is_flushing()
        self.counts[..., 1:].add_(torch.stack([new_sinks, leaving, count - new_sinks - leaving]))
        if counter is not None:
            counter.copy_(self.rows[0, 1:].sum())

    def _is_flushing(self) -> torch.Tensor:
        """True if `Windows.flush` tokens leave the recent window in the next step, never more; bool `[]`."""
        return self.rows[0, 3] >= self.windows.recent + self.windows.flush

    def pack(self, *sides: Side) -> None:
        """Encode the oldest tokens of the tails by PyTorch's operators; keep the codes if these tokens leave now."""
        windows, device = self.windows, self.counts.device
        last = windows.packed_capacity - windows.flush
        if not sides or last < 0:
            return
        first = self.rows[0, 2].clamp(max=last)
        slots = (first + torch.arange(windows.flush, device=device)) % windows.tail_capacity
        for side in sides:
            state = self._carrier.sides[side]
            groups = first // state.codec.group + torch.arange(windows.flush // state.codec.group, device=device)
            rope = None if state.track is None else state.track.gather(groups)
            encoded = state.codec.encode(self.tails[side].index_select(2, slots), rope)
            state.store.write(groups, encoded, self._is_flushing())

    def is_step(self, count: int) -> bool:
        """Return True if `count` new tokens can be a step of static shapes.

        The first tokens cannot, nor can tokens whose mask showed more of the rows' padding.
        """
        as_known = self._carrier.sides["keys"].padding.rows is self._rows
        return not self.empty and 0 < count <= MAX_DECODE_TOKENS and as_known

    def as_dynamic(self) -> DynamicStorage:
        """Return the tokens as a `DynamicStorage`; changing it leaves this storage as it is."""
        length, packed = self.tokens, self.packed_tokens
        sinks = min(length, self.windows.sinks)
        slots = self._slots(packed, length - sinks)
        dynamic = copy.copy(self._carrier)
        dynamic.sides = {}
        for side, state in self._carrier.sides.items():
            dynamic.sides[side] = twin = copy.copy(state)
            twin.sinks = self.sinks[side][:, :, :sinks]
            twin.store, twin.tail = copy.copy(state.store), copy.copy(state.tail)
            twin.store.truncate(packed)
            twin.tail.replace(self.tails[side].index_select(2, slots))
        if dynamic.track is not None and dynamic.leads_track:
            dynamic.track.tokens = length  # steps do not update it
        return dynamic
