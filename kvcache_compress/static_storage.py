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
    """Whether steps have fixed shapes: on CPUs only those of Triton's interpreter, which stands in for a GPU."""
    return backend == "triton" or device.type != "cpu"


class StaticStorage:
    """`sinks | packed | ring` of keys and values, with counters on the device.

    Everything but a step is an edit: the tokens are taken out as a `DynamicStorage`, changed, and put back. Reading
    (`sides`, `tokens`, `edited`) waits for the device, and raises for what went wrong in steps since the last time:
    on a GPU a step itself cannot raise.

    Args:
        dynamic: a storage with `windows.room`, whose tokens and room this one takes over.
    """

    def __init__(self, dynamic: DynamicStorage) -> None:
        self._template = dynamic
        self._states = dynamic.sides
        self.windows = dynamic.windows
        self.buffers = self._new_buffers()
        self.empty = True
        """True until the first tokens, and after an edit that left none: the host can tell it without waiting."""
        self._put_back(dynamic)

    @torch.inference_mode(False)
    def _new_buffers(self) -> StepBuffers:
        return StepBuffers(self._states, self.windows)

    @property
    def sides(self) -> dict[Side, SideState]:
        """Copies of the two sides as they are now, which share what is packed."""
        return self._taken_out().sides

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        self._raise_for_faults()
        return int(self.buffers.length)

    @property
    def packed_tokens(self) -> int:
        return int(self.buffers.packed)

    @property
    def spare(self) -> tuple[torch.Tensor, ...]:
        """Tensors in the model's dtype that are held beside the two sides."""
        return self.buffers.held()

    def segments(self) -> tuple[SideSegments, SideSegments]:
        """All slots of both sides, whether they hold a token or not."""
        windows, buffers = self.windows, self.buffers
        slots = Slots(windows.sinks, windows.capacity, windows.ring, buffers.room, buffers.length, buffers.packed)
        keys, values = (
            SideSegments(
                buffers.sinks[side], state.store, windows.capacity, buffers.ring[side], windows.ring, state.codec,
                state.track, slots,
            )
            for side, state in self._states.items()
        )  # fmt: skip
        return keys, values

    @property
    def dense_parts(self) -> dict[Side, torch.Tensor]:
        """As `DynamicStorage.dense_parts`."""
        return self.buffers.sinks

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, total: torch.Tensor | None = None
    ) -> tuple[SideSegments, SideSegments]:
        """As `DynamicStorage.append`; of a step the segments are all slots."""
        if not self.steps(keys.shape[2]):
            with self.edited() as dynamic:
                return dynamic.append(keys, values, total)
        if (track := self._template.track) is not None:
            positions = torch.arange(keys.shape[2], device=keys.device) + self.buffers.length
            track.write(positions, keys, again=not self._template.leads_track)
        self.buffers.step(self._states, {"keys": keys, "values": values}, total)
        return self.segments()

    def steps(self, count: int) -> bool:
        """Whether so many new tokens are a step of fixed shapes: not the first ones, which set statistics."""
        return not self.empty and 0 < count <= MAX_DECODE_TOKENS

    @contextmanager
    def edited(self) -> Iterator[DynamicStorage]:
        """The tokens as a `DynamicStorage`, which are put back afterwards; after an error all is as it was."""
        dynamic = self._taken_out()
        yield dynamic
        self._put_back(dynamic)

    def _taken_out(self) -> DynamicStorage:
        buffers, track = self.buffers, self._template.track
        length, packed = self.tokens, self.packed_tokens
        sinks = min(length, self.windows.sinks)
        slots = buffers.slots(packed, length - sinks)
        dynamic = copy.copy(self._template)
        dynamic.sides = {}
        for side, state in self._states.items():
            dynamic.sides[side] = twin = copy.copy(state)
            twin.sinks = buffers.sinks[side][:, :, :sinks]
            twin.store, twin.tail = copy.copy(state.store), copy.copy(state.tail)
            twin.store.truncate(packed)
            twin.tail.replace(buffers.ring[side].index_select(2, slots))
        if track is not None and self._template.leads_track:
            track.tokens = length
        return dynamic

    def _put_back(self, dynamic: DynamicStorage) -> None:
        """Takes tokens over, and encodes what left the recent window but is not packed yet.

        A kernel that steps encode with takes that from the ring when it is packed.
        """
        self._states, self.empty = dynamic.sides, dynamic.empty
        if not self.buffers.fit(self._states):
            self.buffers = self._new_buffers()
        packed = dynamic.packed_tokens
        for side, state in self._states.items():
            group = state.codec.group
            early = max(0, state.tail.tokens - self.windows.recent) // group * group
            if early and not triton_encoder(state.codec):
                state.pack(state.tail.view(), early, growing=False)
                state.store.truncate(packed)
            self.buffers.load(side, state, packed)

    def _raise_for_faults(self) -> None:
        checks = self._template.checks
        checks.raise_for_known()
        if not (fault := int(self.buffers.fault.amax())):
            return
        if fault == FULL:
            assert self.windows.room is not None
            raise full(checks.layer, self.windows.room)
        raise not_packable("keys or values", checks.layer)
