"""A compressed layer of fixed capacity, whose decode steps have fixed shapes and wait for nothing: for CUDA graphs.

Tokens are `sinks | packed | recent` as in the growing layer, with the same codes at the same steps. Between prompts,
the layer is *frozen*: its counters are tensors, the recent tokens lie in a ring, and a step writes its tokens to the
ring and encodes as many that have left the recent window, so that no step costs more than another. They count as packed
`flush_tokens` at a time, when the growing layer would encode them. All other operations *thaw* it: the base class's
own state is set up from the buffers, changed, and frozen again before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import ops
from .backend import on_device
from .checks import LONGEST, longest, not_packable
from .codec import Side
from .layer import CompressedLayer
from .side import SideState
from .slots import SlotKV, Slots
from .view import MAX_DECODE_TOKENS, PackedKV, SideSegments

NOT_FINITE, FULL = 1, 2


class FixedCapacityLayer(CompressedLayer):
    """`CompressedLayer` for at most `config.max_cache_len` tokens, all of whose room is there from the first token on.

    What depends on data is set from the first prompt. On a GPU a step cannot raise: tokens that are not finite, or too
    many, raise at the next operation that is not a step.
    """

    is_compileable = True

    def _forget(self) -> None:
        super()._forget()
        self._frozen = False

    @property
    def max_cache_len(self) -> int:
        assert self.config.max_cache_len is not None
        return self.config.max_cache_len

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        left = max(0, self.max_cache_len - self.plan.sink_tokens)
        self.capacity = -(-left // self.group) * self.group
        self.ring_tokens = self.plan.recent_tokens + self.flush_tokens + MAX_DECODE_TOKENS
        for state in self._sides.values():
            state.store.fix(self.capacity + self.group)
        if self.track is not None:
            self.track.reserve(self.plan.sink_tokens + self.capacity, key_states)
        counters = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(4))
        self._length, self._packed, self._fault, self.cumulative_length = counters
        torch._dynamo.mark_static_address(self.cumulative_length)
        self._allocate()

    @torch.inference_mode(False)
    def _allocate(self) -> None:
        """The buffers that steps write, each with one place more for what is to be nowhere."""
        sinks, ring = self.plan.sink_tokens + 1, self.ring_tokens + 1
        self._sinks: dict[Side, torch.Tensor] = {}
        self._ring: dict[Side, torch.Tensor] = {}
        for side, state in self._sides.items():
            batch, heads, _, dim = state.sinks.shape
            self._sinks[side] = state.sinks.new_zeros(batch, heads, sinks, dim)
            self._ring[side] = state.sinks.new_zeros(batch, heads, ring, dim)

    def _freeze(self) -> None:
        """Sets up buffers and counters for steps, and encodes what left the window but is not packed yet."""
        if self._frozen:
            return
        keys = self._sides["keys"]
        if any(not _alike(self._ring[side], state.sinks) for side, state in self._sides.items()):
            self._allocate()
        packed, tail, sinks = keys.store.tokens, keys.tail.tokens, int(keys.sinks.shape[2])
        slots = (torch.arange(packed, packed + tail) % self.ring_tokens).to(keys.sinks.device)
        for side, state in self._sides.items():
            self._prepare(state)
            group = state.codec.group
            early = max(0, tail - self.plan.recent_tokens) // group * group
            if early:
                state.pack(state.tail.view(), early, self.backend, growing=False)
                state.store.truncate(packed)
            self._sinks[side][:, :, :sinks] = state.sinks
            self._ring[side].index_copy_(2, slots, state.tail.view())
            state.sinks = self._sinks[side][:, :, :sinks]
            state.tail.clear()
        self._length.fill_(sinks + packed + tail)
        self._packed.fill_(packed)
        self._frozen = True

    def _settle(self) -> None:
        """What others see of the layer between a change and the next step, which freezes it."""
        if self._sides:
            self.cumulative_length.fill_(self._host_length())

    def _prepare(self, state: SideState) -> None:
        """Statistics from the first prompt, though nothing of it is packed; from its sinks too where it is short."""
        if not state.prepared:
            tail = state.tail.view()
            enough = state.tail.tokens >= self.plan.recent_tokens or not state.sinks.shape[2]
            state.prepare(tail if enough else torch.cat([state.sinks, tail], 2))

    def _thaw(self) -> None:
        """Sets up the base class's state; raises for what went wrong in steps since.

        With a new number: a recorded CUDA graph knows the old buffers, and nothing of what is about to change.
        """
        self._checks.raise_for_known()
        if not self._frozen:
            return
        if fault := int(self._fault):
            self._raise(fault)
        length, packed = int(self._length), int(self._packed)
        sinks = min(length, self.plan.sink_tokens)
        slots = (torch.arange(packed, length - sinks) % self.ring_tokens).to(self._packed.device)
        for side, state in self._sides.items():
            state.sinks = self._sinks[side][:, :, :sinks]
            state.store.truncate(packed)
            state.tail.replace(self._ring[side].index_select(2, slots))
        if self.track is not None and self.leads_track:
            self.track.tokens = length
        self._frozen = False
        self.number = ops.register(self, self.number)

    def _raise(self, fault: int) -> None:
        if fault == FULL:
            raise ValueError(f"layer {self.index} is full: max_cache_len={self.max_cache_len} tokens are not enough")
        raise not_packable("keys or values", self.index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | PackedKV, torch.Tensor | PackedKV]:
        """As in the base class, except that dense tensors have `max_cache_len` tokens, the last of them zero."""
        if torch.compiler.is_compiling():
            step = self._is_step(key_states)
            updated = self._update_when_run(key_states, value_states)
            if step:
                self.cumulative_length.add_(key_states.shape[2])
            return updated
        if not self.fused or key_states.shape[2] > MAX_DECODE_TOKENS:
            dense = self.dense_step(key_states, value_states)
            self.cumulative_length.copy_(self._length)
            return dense
        self.store(key_states, value_states)
        self.cumulative_length.copy_(self._length)
        return self.view("keys"), self.view("values")

    def _is_step(self, key_states: torch.Tensor) -> bool:
        batch, _, tokens, _ = key_states.shape
        return 0 < tokens <= MAX_DECODE_TOKENS and self.is_initialized and batch == self.batch_size > 0

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[SideSegments, SideSegments]:
        """As in the base class. The segments of a step are `view`'s; those of a prompt hold its tokens as given."""
        self._check_shapes(key_states, value_states)
        fresh: dict[Side, torch.Tensor] = {"keys": key_states.detach(), "values": value_states.detach()}
        if self._is_step(key_states):
            self._widen(fresh)
            self._freeze()
            self._step(fresh)
            keys, values = (self._slots_of(side) for side in fresh)
            return keys, values
        self._thaw()
        if self._host_length() + key_states.shape[2] > self.max_cache_len:
            self._raise(FULL)
        for side, x in fresh.items():
            if x.numel():
                self._checks.add(side, x)
        segments = super().store(key_states, value_states)
        self._settle()
        self._freeze()
        return segments

    def _widen(self, fresh: dict[Side, torch.Tensor]) -> None:
        """Makes room for numbers of a wider dtype than those that are there."""
        for side, x in fresh.items():
            if torch.promote_types(x.dtype, self._ring[side].dtype) != self._ring[side].dtype:
                self._thaw()
                self._sides[side].widen(x.dtype)

    def dense_step(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        segments = self.store(key_states, value_states)
        if key_states.shape[2] <= MAX_DECODE_TOKENS:
            return self.view("keys").dense(), self.view("values").dense()
        keys, values = (side.dense() for side in segments)
        spare = (0, 0, 0, self.max_cache_len - keys.shape[2])
        return torch.nn.functional.pad(keys, spare), torch.nn.functional.pad(values, spare)

    def view(self, side: Side) -> PackedKV:
        self._freeze()
        sinks, room = self.plan.sink_tokens, self.max_cache_len
        slots = Slots(sinks, self.capacity, self.ring_tokens, room, self._length, self._packed)
        return SlotKV(self._slots_of("keys"), self._slots_of("values"), side, self.backend, slots)

    def _slots_of(self, side: Side) -> SideSegments:
        """All that steps write, whether it holds a token or not."""
        state = self._sides[side]
        sinks = self._sinks[side][:, :, : self.plan.sink_tokens]
        ring = self._ring[side][:, :, : self.ring_tokens]
        return SideSegments(sinks, state.store, self.capacity, ring, state.codec, state.track, self._packed)

    @property
    def sides(self) -> dict[Side, SideState]:
        self._thaw()
        return self._sides

    @property
    def packed_tokens(self) -> int:
        return int(self._packed) if self._frozen else super().packed_tokens

    @property
    def spare_bytes(self) -> int:
        if not self._sides:
            return 0
        return sum(x.nbytes for x in (*self._sinks.values(), *self._ring.values()))

    def _dense(self, side: Side) -> torch.Tensor | None:
        self._thaw()
        return super()._dense(side)

    def crop(self, tokens_to_remove: int) -> None:
        self._thaw()
        super().crop(tokens_to_remove)
        self._settle()

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._thaw()
        with torch.inference_mode(False):
            super()._apply(change)
        self._settle()

    def _step(self, fresh: dict[Side, torch.Tensor]) -> None:
        """A decode step of n tokens; every shape depends on n alone, and no value is read back."""
        count, sinks = fresh["keys"].shape[2], self.plan.sink_tokens
        self._check(fresh, count)
        positions = torch.arange(count, device=self._length.device) + self._length
        kept = self._length - sinks - self._packed
        leaving = (kept - self.plan.recent_tokens).clamp_min(0) // self.flush_tokens * self.flush_tokens
        self._packed.add_(leaving)
        self._length.add_(count)
        sink_slots = positions.clamp(max=sinks)
        ring_slots = torch.where(positions < sinks, self.ring_tokens, (positions - sinks) % self.ring_tokens)
        if self.track is not None:
            self.track.write(positions, fresh["keys"], again=not self.leads_track)
        for side, x in fresh.items():
            x = x.to(self._ring[side].dtype)
            self._sinks[side].index_copy_(2, sink_slots, x)
            self._ring[side].index_copy_(2, ring_slots, x)
            self._encode_leaving(side, count)

    def _check(self, fresh: dict[Side, torch.Tensor], count: int) -> None:
        """Notes what must not be stored; raises at once where that needs no waiting."""
        lengths = [longest(x) for x in fresh.values()]
        good = torch.stack(lengths).amax() <= LONGEST
        fault = torch.where(good, 0, NOT_FINITE)
        fault = torch.where(self._length + count > self.max_cache_len, FULL, fault)
        if self.device.type == "cpu":
            if int(fault):
                self._raise(int(fault))
        else:
            self._fault.copy_(torch.maximum(self._fault, fault))

    def _encode_leaving(self, side: Side, count: int) -> None:
        """Encodes the groups that the last of `count` tokens to leave the recent window made whole."""
        state = self._sides[side]
        group = state.codec.group
        stop = self._length - self.plan.sink_tokens - self.plan.recent_tokens
        device = stop.device
        groups = stop // group - torch.arange((count - 1) // group + 1, device=device) - 1
        new = (groups * group >= self._packed) & ((groups + 1) * group > stop - count)
        new &= (groups >= 0) & ((groups + 1) * group <= self.capacity)
        tokens = (groups[:, None] * group + torch.arange(group, device=device)).flatten()
        rope = None
        if state.track is not None:
            rope = state.track.gather((tokens + self.plan.sink_tokens).clamp_min(0))
        x = self._ring[side].index_select(2, tokens % self.ring_tokens)
        with on_device(x):
            encoded = state.codec.encode(x, rope, self.backend)
        state.store.write(torch.where(new, groups, self.capacity // group), encoded, group)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Tokens so far: a tensor, as in Transformers' static layers, so that compiled code does not depend on it."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length


def _alike(ring: torch.Tensor, sinks: torch.Tensor) -> bool:
    return (ring.shape[0], ring.device, ring.dtype) == (sinks.shape[0], sinks.device, sinks.dtype)
