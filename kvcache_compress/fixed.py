"""A compressed layer of fixed capacity, whose decode steps have fixed shapes and wait for nothing: for CUDA graphs.

Tokens are `sinks | packed | recent` as in the growing layer, with the same codes at the same steps. Between prompts,
the layer is *frozen*: its counters are tensors, the recent tokens lie in a ring, and a step writes its tokens to the
ring and encodes as many that have left the recent window, so that no step costs more than another. They count as packed
`flush_tokens` at a time, when the growing layer would encode them. All other operations *thaw* it: the base class's
own state is set up from the buffers, changed, and frozen again before the next step.

On CPUs, where there are no graphs and nothing waits, the layer is never frozen: its steps are the growing layer's,
which encodes `flush_tokens` at once, within the room that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import ops
from .checks import not_packable
from .chunk import ChunkKV
from .codec import Side
from .config import CompressionConfig, LayerPlan
from .fixed_step import FULL, StepBuffers, Windows
from .gradients import wanted, with_step
from .layer import CompressedLayer
from .side import SideState, measured, triton_encoder
from .slots import SlotKV, Slots
from .view import MAX_DECODE_TOKENS, PackedKV, SideSegments


class FixedCapacityLayer(CompressedLayer):
    """`CompressedLayer` for at most `config.max_cache_len` tokens, all of whose room is there from the first token on.

    What depends on data is set from the first prompt. On a GPU a step cannot raise: tokens that are not finite, or too
    many, raise at the next operation that is not a step.
    """

    is_compileable = True

    def __init__(self, index: int, plan: LayerPlan, config: CompressionConfig, *others: Any) -> None:
        assert config.max_cache_len is not None
        room = config.max_cache_len
        # Wider windows than that hold no more, and their buffers are made at once.
        windows = {name: min(getattr(plan, name), room) for name in ("sink_tokens", "recent_tokens")}
        super().__init__(index, replace(plan, **windows), config, *others)

    def _forget(self) -> None:
        super()._forget()
        self._frozen = False
        self._buffers: StepBuffers | None = None

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
        self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
        torch._dynamo.mark_static_address(self.cumulative_length)

    @property
    def _freezes(self) -> bool:
        """Whether steps have fixed shapes: on CPUs only those of Triton's interpreter, which stands in for a GPU."""
        return self.backend == "triton" or self.device.type != "cpu"

    def _freeze(self) -> StepBuffers:
        """Sets up buffers and counters for steps, and encodes what left the window but is not packed yet.

        A kernel that steps encode with takes that from the ring when it is packed.
        """
        if self._frozen and self._buffers is not None:
            return self._buffers
        buffers = self._allocated()
        keys = self._sides["keys"]
        packed, tail = keys.store.tokens, keys.tail.tokens
        for side, state in self._sides.items():
            group = state.codec.group
            early = max(0, tail - self.plan.recent_tokens) // group * group
            if early and not triton_encoder(state.codec):
                state.pack(state.tail.view(), early, growing=False)
                state.store.truncate(packed)
            buffers.load(side, state, packed)
        self._frozen = True
        return buffers

    @torch.inference_mode(False)
    def _allocated(self) -> StepBuffers:
        """Buffers for sides like these, at the same addresses as long as they are."""
        if self._buffers is None or not self._buffers.fit(self._sides):
            plan = self.plan
            windows = Windows(
                plan.sink_tokens, self.capacity, self.ring_tokens, plan.recent_tokens, self.flush_tokens,
                self.max_cache_len,
            )  # fmt: skip
            self._buffers = StepBuffers(self._sides, windows)
        return self._buffers

    def _settle(self) -> None:
        """What others see of the layer between a change and the next step, which freezes it."""
        if self._sides:
            self.cumulative_length.fill_(self._host_length())

    def _prepare(self, state: SideState) -> None:
        """Statistics from the first prompt, though nothing of it is packed; from its sinks too where it is short."""
        if not state.prepared and self._host_length():
            there = torch.cat([state.sinks, state.tail.view()], 2)
            state.prepare(measured(there, state.sinks.shape[2], self.plan.recent_tokens))

    def _thaw(self) -> None:
        """Sets up the base class's state; raises for what went wrong in steps since.

        With a new number: a recorded CUDA graph knows the old buffers, and nothing of what is about to change.
        """
        self._checks.raise_for_known()
        if not self._frozen:
            return
        buffers = self._freeze()
        if fault := int(buffers.fault.amax()):
            self._raise(fault)
        length, packed = int(buffers.length), int(buffers.packed)
        sinks = min(length, self.plan.sink_tokens)
        slots = buffers.slots(packed, length - sinks)
        for side, state in self._sides.items():
            state.sinks = buffers.sinks[side][:, :, :sinks]
            state.store.truncate(packed)
            state.tail.replace(buffers.ring[side].index_select(2, slots))
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
        """As in the base class, except that all has `max_cache_len` tokens, the last of them zero: as masks have."""
        if torch.compiler.is_compiling():
            goes_on = self._goes_on(key_states)
            updated = self._update_when_run(key_states, value_states)
            if goes_on:
                self.cumulative_length.add_(key_states.shape[2])
            return updated
        segments = self._store(key_states, value_states, counting=True)
        keys, values = self._seen(*segments, "keys"), self._seen(*segments, "values")
        if wanted(key_states, value_states):
            count = key_states.shape[2]
            start = (self.cumulative_length - count).clamp(max=self.max_cache_len - count)
            return with_step(keys.dense(), key_states, start), with_step(values.dense(), value_states, start)
        return (keys, values) if self.fused else (keys.dense(), values.dense())

    def _is_step(self, key_states: torch.Tensor) -> bool:
        few = 0 < key_states.shape[2] <= MAX_DECODE_TOKENS
        # Where nothing is there yet (`early_initialization`), statistics are to be set first.
        return few and self._goes_on(key_states) and (self._frozen or self._host_length() > 0)

    def _goes_on(self, key_states: torch.Tensor) -> bool:
        """Whether the layer's counter stays, which compiled code then adds to: that code must see all its changes."""
        return self.is_initialized and bool(key_states.shape[0] == self.batch_size > 0)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[SideSegments, SideSegments]:
        """As in the base class. The segments of a step are `view`'s; those of a prompt hold its tokens as given."""
        return self._store(key_states, value_states, counting=False)

    def _store(
        self, key_states: torch.Tensor, value_states: torch.Tensor, counting: bool
    ) -> tuple[SideSegments, SideSegments]:
        """`store`; `counting` has a step count its tokens, which compiled code does itself."""
        self._check_shapes(key_states, value_states)
        fresh: dict[Side, torch.Tensor] = {"keys": key_states.detach(), "values": value_states.detach()}
        goes_on = self._goes_on(key_states)
        if self._is_step(key_states) and self._freezes:
            self._step(fresh, self.cumulative_length if counting else None)
            return self._slots_of("keys"), self._slots_of("values")
        self._thaw()
        if self._host_length() + key_states.shape[2] > self.max_cache_len:
            self._raise(FULL)
        for side, x in fresh.items():
            if x.numel():
                self._checks.add(side, x)
        segments = super().store(key_states, value_states)
        for state in self._sides.values():
            self._prepare(state)
        if counting or not goes_on:
            self._settle()
        if self._freezes:
            self._freeze()
        return segments

    def _check_packable(self, tails: dict[Side, torch.Tensor], leaving: int) -> None:
        """Nothing is left to check: all tokens were, when they came."""

    def dense_step(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        segments = self.store(key_states, value_states)
        return self._seen(*segments, "keys").dense(), self._seen(*segments, "values").dense()

    def view(self, side: Side) -> PackedKV:
        if self._freezes:
            self._freeze()
            return self._seen(self._slots_of("keys"), self._slots_of("values"), side)
        keys, values = (state.everything() for state in self._sides.values())
        return self._seen(keys, values, side)

    def _seen(self, keys: SideSegments, values: SideSegments, side: Side) -> PackedKV:
        """A side of what `store` gave."""
        if keys.count is None:
            return ChunkKV(keys, values, side, self.backend, self.max_cache_len)
        buffers = self._freeze()
        windows = buffers.windows
        slots = Slots(windows.sinks, windows.capacity, windows.ring, windows.room, buffers.length, buffers.packed)
        return SlotKV(keys, values, side, self.backend, slots)

    def _slots_of(self, side: Side) -> SideSegments:
        """All that steps of fixed shapes write, whether it holds a token or not."""
        state, buffers = self._sides[side], self._freeze()
        return SideSegments(
            buffers.sinks[side], state.store, self.capacity, buffers.ring[side], self.ring_tokens, state.codec,
            state.track, buffers.packed,
        )  # fmt: skip

    @property
    def sides(self) -> dict[Side, SideState]:
        self._thaw()
        return self._sides

    @property
    def packed_tokens(self) -> int:
        return int(self._freeze().packed) if self._frozen else super().packed_tokens

    @property
    def spare(self) -> tuple[torch.Tensor, ...]:
        return () if self._buffers is None else self._buffers.held()

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

    def _step(self, fresh: dict[Side, torch.Tensor], total: torch.Tensor | None) -> None:
        """A step of fixed shapes, after room is made for numbers of a wider dtype than those that are there."""
        held = self._freeze().ring
        for side, x in fresh.items():
            if x.dtype != held[side].dtype and torch.promote_types(x.dtype, held[side].dtype) != held[side].dtype:
                self._thaw()
                self._accepted = None
                self._sides[side].widen(x.dtype)
        buffers = self._freeze()
        if self.track is not None:
            positions = torch.arange(fresh["keys"].shape[2], device=buffers.length.device) + buffers.length
            self.track.write(positions, fresh["keys"], again=not self.leads_track)
        buffers.step(self._sides, fresh, self.backend, total)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Tokens so far: a tensor, as in Transformers' static layers, so that compiled code does not depend on it."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length
