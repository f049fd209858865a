"""Tokens of a compressed layer whose decode steps have fixed shapes and wait for nothing: for CUDA graphs.

Tokens are `sinks | packed | recent` as in a growing layer, with the same codes at the same steps. But their numbers are
tensors, the recent tokens lie in a ring, and a step writes its tokens to the ring and encodes as many that have left
the recent window, so that no step costs more than another. They count as packed `Windows.flush` at a time, when a
growing layer would encode them.

On CPUs, where there are no graphs and nothing waits, a layer of fixed capacity has a `DynamicStorage` with its room.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .checks import full, not_packable
from .codec import Backend, Side
from .dynamic_storage import DynamicStorage
from .fixed_step import FULL, StepBuffers
from .path import MAX_DECODE_TOKENS
from .side import SideState, triton_encoder
from .slots import Slots
from .view import SideSegments


def has_static_steps(backend: Backend, device: torch.device) -> bool:
    """True where steps have fixed shapes: on CPUs only in Triton's interpreter, which stands in for a GPU."""
    return backend == "triton" or device.type != "cpu"


class StaticStorage:
    """`sinks | packed | ring` of keys and values, with counters on the device.

    Everything but a step is an edit: the tokens are taken out as a `DynamicStorage`, changed, and put back. Reading
    (`sides`, `tokens`, `taken_out`) waits for the device, and raises for what went wrong in steps since the last time:
    on a GPU a step itself cannot raise.

    Args:
        dynamic: a storage with `windows.room`, whose tokens and room this one takes over.
    """

    def __init__(self, dynamic: DynamicStorage) -> None:
        assert dynamic.windows.room is not None
        self.windows = dynamic.windows
        self.buffers = self._new_buffers(dynamic)
        self._put_back(dynamic)

    @torch.inference_mode(False)
    def _new_buffers(self, dynamic: DynamicStorage) -> StepBuffers:
        return StepBuffers(dynamic.sides, self.windows)

    @property
    def sides(self) -> dict[Side, SideState]:
        """Copies of the two sides as they are now, which share what is packed."""
        return self._read().sides

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
        """As `DynamicStorage.dense_buffers`."""
        return (*self.buffers.sinks.values(), *self.buffers.ring.values())

    def segments(self) -> tuple[SideSegments, SideSegments]:
        """All slots of both sides, whether they hold a token or not."""
        windows, buffers = self.windows, self.buffers
        slots = Slots(windows.sinks, windows.capacity, windows.ring, buffers.room, buffers.length, buffers.packed)
        keys, values = (
            SideSegments(
                buffers.sinks[side], state.store, windows.capacity, buffers.ring[side], windows.ring, state.codec,
                state.track, slots,
            )
            for side, state in self._carrier.sides.items()
        )  # fmt: skip
        return keys, values

    @property
    def dense_parts(self) -> dict[Side, torch.Tensor]:
        """As `DynamicStorage.dense_parts`."""
        return self.buffers.sinks

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor | None = None
    ) -> tuple[SideSegments, SideSegments]:
        """As `DynamicStorage.append`; of a step the segments are all slots."""
        if not self.is_step(keys.shape[2]):
            with self.taken_out() as dynamic:
                return dynamic.append(keys, values, counter)
        carrier = self._carrier
        if carrier.track is not None:
            positions = torch.arange(keys.shape[2], device=keys.device) + self.buffers.length
            carrier.track.write(positions, keys, again=not carrier.leads_track)
        self.buffers.step(carrier.sides, {"keys": keys, "values": values}, counter)
        return self.segments()

    def is_step(self, count: int) -> bool:
        """True for so many new tokens in a step of fixed shapes: not the first ones, which set statistics."""
        return not self.empty and 0 < count <= MAX_DECODE_TOKENS

    @contextmanager
    def taken_out(self) -> Iterator[DynamicStorage]:
        """The tokens as a `DynamicStorage`, which are put back afterwards; after an error all is as it was."""
        dynamic = self._read()
        yield dynamic
        self._put_back(dynamic)

    def _read(self) -> DynamicStorage:
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
            twin.tail.replace(buffers.ring[side].index_select(2, slots))
        if dynamic.track is not None and dynamic.leads_track:
            dynamic.track.tokens = length  # which steps do not count
        return dynamic

    def _put_back(self, dynamic: DynamicStorage) -> None:
        """Takes tokens over, and encodes what left the recent window but is not packed yet.

        A kernel that steps encode with takes that from the ring when it is packed.
        """
        empty, packed = dynamic.empty, dynamic.packed_tokens
        for state in dynamic.sides.values():
            group = state.codec.group
            early = max(0, state.tail.tokens - self.windows.recent) // group * group
            if early and not triton_encoder(state.codec):
                state.pack(state.tail.view(), early, growing=False)
                state.store.truncate(packed)
        # New buffers count only once they are filled: without memory for them all stays as it was.
        buffers = self.buffers if self.buffers.fits(dynamic.sides) else self._new_buffers(dynamic)
        for side, state in dynamic.sides.items():
            buffers.load(side, state, packed)
        self.buffers, self._carrier = buffers, dynamic
        """Codecs and packed stores; what else it holds is in the buffers, and not kept up here."""
        self.empty = empty
        """True until the first tokens, and after an edit that left none: the host can tell it without waiting."""

    def _raise_for_faults(self) -> None:
        checks = self._carrier.checks
        checks.raise_for_known()
        if not (fault := int(self.buffers.fault.amax())):
            return
        if fault == FULL:
            raise full(checks.layer, self.buffers.room)
        raise not_packable("keys or values", checks.layer)
