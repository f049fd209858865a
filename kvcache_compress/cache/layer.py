"""One compressed layer: what Transformers asks of a cache layer, over a storage of `sinks | packed | tail`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcache_compress.attention import compile_ops as ops
from kvcache_compress.attention.handle import PackedKV, Step, gradients_wanted, with_step
from kvcache_compress.attention.interface import ATTENTION_NAME
from kvcache_compress.codecs.backend import resolve_backend
from kvcache_compress.codecs.base import Codec, CodecContext, Side
from kvcache_compress.config import CompressionConfig, LayerPlan, SideConfig
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.checks import PackableChecks, check_batch, check_states, full_error, tokens_after_crop
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.rope_track import RopeTrack
from kvcache_compress.storage.segments import SideSegments
from kvcache_compress.storage.side import MAX_DECODE_TOKENS, SideState, Windows
from kvcache_compress.storage.static import StaticStorage, has_static_steps

from .row_operations import RowOperations

FLUSH_TOKENS = 32
"""Tokens that leave the recent window together, so that the cost of encoding is spread over as many steps."""


class CompressedLayer(RowOperations):
    """A full-attention layer's cache whose older tokens are encoded by one codec per side.

    New tokens go to `tail`. Once `FLUSH_TOKENS` more than `recent_tokens` are there, the oldest are encoded and
    appended to `packed`, where they are never touched again. A step attends to its own tokens, and to all that were
    dense when it began, in full precision.

    With `compression.max_cache_len` all buffers are made before the first token, masks and decoded tokens have that
    many tokens, the last of them zero, and what depends on data is set from the first prompt. On a GPU its steps have
    fixed shapes and cannot raise: tokens that are not finite, or too many, raise at the next operation that is not a
    step.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        index: int,
        plan: LayerPlan,
        compression: CompressionConfig,
        decoder_config: PreTrainedConfig,
        rope: RopeLayout | None = None,
        track: RopeTrack | None = None,
        leads_track: bool = True,
    ) -> None:
        self.index = index
        self.compression = compression
        self.max_cache_len = capacity = compression.max_cache_len
        if capacity is not None:
            # Wider windows than that hold no more, and their buffers are made at once.
            windows = {name: min(getattr(plan, name), capacity) for name in ("sink_tokens", "recent_tokens")}
            plan = replace(plan, **windows)
        self.plan = plan
        self.decoder_config = decoder_config
        self.rope = rope
        self.track = track
        self.leads_track = leads_track
        self._forget()

    def _forget(self) -> None:
        self.is_initialized = False
        self.number = ops.register(self, getattr(self, "number", None))
        self.storage: DynamicStorage | StaticStorage | None = None
        self._checks = PackableChecks(self.index)
        self._accepted: tuple[Any, ...] | None = None

    @property
    def is_compileable(self) -> bool:
        """True for `generate` to compile the model's forward: where shapes do not change from step to step."""
        return self.max_cache_len is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Builds codecs and an empty storage for tensors like these, `[B, H, T, D]`."""
        with self._writable_buffers():
            self._initialize(key_states, value_states)

    def _writable_buffers(self) -> AbstractContextManager[Any]:
        """Leaves inference mode for a fixed capacity, whose buffers are written in place outside of it as well."""
        leaves = self.max_cache_len is not None and torch.is_inference_mode_enabled()
        return torch.inference_mode(False) if leaves else nullcontext()

    def _initialize(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self._accepted = None
        if self.track is not None:
            self.track = self.track.at(self.device, self.index)
            self.leads_track = self.track.leader == self.index
        inputs: dict[Side, torch.Tensor] = {"keys": key_states.detach(), "values": value_states.detach()}
        codecs = {side: self._codec(side, self.plan.side(side), x) for side, x in inputs.items()}
        self.backend = resolve_backend(self.compression.backend, self.device, codecs.values())
        codecs = {side: codec.on(self.backend) for side, codec in codecs.items()}
        self.group = math.lcm(*(codec.group for codec in codecs.values()))
        self.flush_tokens = math.lcm(FLUSH_TOKENS, self.group)
        plan, usual = self.plan, self.plan.recent_tokens + self.flush_tokens
        sides = {
            side: SideState(codec, inputs[side], usual, self.track if plan.rope_use(side) == "factors" else None)
            for side, codec in codecs.items()
        }
        windows = Windows(plan.sink_tokens, plan.recent_tokens, self.flush_tokens, self.group, self.max_cache_len)
        self.storage = storage = DynamicStorage(
            sides, windows, self._checks, flushes_steps=self.compression.quantize_generated, track=self.track,
            leads_track=self.leads_track,
        )  # fmt: skip
        if self.max_cache_len is not None:
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
            torch._dynamo.mark_static_address(self.cumulative_length)
            if has_static_steps(self.backend, self.device):
                self.storage = StaticStorage(storage)
        self.is_initialized = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer to compiled code."""
        self.__dict__.update(state)
        self.number = ops.register(self)

    def _codec(self, side: Side, config: SideConfig, states: torch.Tensor) -> Codec:
        context = CodecContext(
            side=side, head_dim=states.shape[-1], heads=states.shape[1], layer=self.index, seed=self.compression.seed,
            sink_tokens=self.plan.sink_tokens, dtype=states.dtype, device=states.device, rope=self.rope,
        )  # fmt: skip
        return config.codec()(config.options(), context)

    @property
    def sides(self) -> dict[Side, SideState]:
        """The two sides; empty before the first update. Not to be changed: `edited` is for that."""
        return {} if self.storage is None else self.storage.sides

    @property
    def fused(self) -> bool:
        config = self.decoder_config
        if torch.compiler.is_compiling():
            return bool(config._attn_implementation == ATTENTION_NAME)
        # The same without the config's own look at each attribute, which takes 3 us: every layer asks at every step.
        return bool(object.__getattribute__(config, "_attn_implementation_internal") == ATTENTION_NAME)

    @property
    def packed_tokens(self) -> int:
        return 0 if self.storage is None else self.storage.packed_tokens

    @property
    def dense_buffers(self) -> tuple[torch.Tensor, ...]:
        """The room of the dense tokens of both sides, in the model's dtype."""
        return () if self.storage is None else self.storage.dense_buffers

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, decoded: `[B, H, T, D]`. None before the first update."""
        return self._dense("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """All values, as `keys`."""
        return self._dense("values")

    def _dense(self, side: Side) -> torch.Tensor | None:
        if self.storage is None:
            return None
        if self.storage.dense_parts[side].device != self.device:
            self.prefetch()
        if self.compression.offloading and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.storage.sides[side].all_segments().dense()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | PackedKV, torch.Tensor | PackedKV]:
        """Stores `[B, H, T, D]` keys and values and returns what this step attends to.

        Plain tensors while nothing is packed, while fused attention is off, or for gradients, which reach these keys
        and values but none of an earlier step; else `PackedKV`.

        Raises:
            ValueError: another batch size than before, more tokens than there is room for, or tokens to be packed that
                are not finite. The cache is unchanged (on a GPU, where waiting for the check would stall, a later
                update raises).
        """
        if torch.compiler.is_compiling():
            return self._update_when_run(key_states, value_states)
        capacity, storage = self.max_cache_len, self.storage
        first = capacity is None and (storage is None or not storage.tokens)
        keys, values = self._append(key_states, value_states, counting=capacity is not None)
        if first:
            return key_states, value_states
        step = Step(keys, values, self.backend, capacity)
        # Asked by every layer at every step: `gradients_wanted` would cost more than what it asks.
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            count = key_states.shape[2]
            start: Any = keys.shape[2] - count
            if capacity is not None:
                start = (self.cumulative_length - count).clamp(max=capacity - count)
            k_dense, v_dense = step.dense("keys"), step.dense("values")
            return with_step(k_dense, key_states, start), with_step(v_dense, value_states, start)
        if self.fused and (keys.packed or capacity is not None):
            return PackedKV(step, "keys"), PackedKV(step, "values")
        return step.dense("keys"), step.dense("values")

    def _update_when_run(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor | PackedKV, torch.Tensor | PackedKV]:
        """`update` while the model is traced: what the compiled code will do when it runs."""
        if gradients_wanted(key_states, value_states):
            raise ValueError(
                "gradients of keys and values: allowed where the model is not compiled, else torch.no_grad()"
            )
        tokens = key_states.shape[2]
        total = self.get_mask_sizes(tokens)[0]
        counts = self.max_cache_len is not None and self._keeps_counter(key_states)
        trace = ops.traced_step if self.fused and tokens <= MAX_DECODE_TOKENS else ops.decoded
        found: tuple[Any, Any] = trace(self, key_states, value_states, total)
        if counts:
            self.cumulative_length.add_(tokens)
        return found

    def _keeps_counter(self, key_states: torch.Tensor) -> bool:
        """True where the layer's counter stays, which compiled code then adds to: it must see all of its changes."""
        return self.is_initialized and bool(key_states.shape[0] == self.batch_size > 0)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[SideSegments, SideSegments]:
        """`update` as compiled code runs it: stores `[B, H, T, D]`; returns the segments that this step attends to.

        A counter of fixed capacity stays as it is, unless it is a new one: the compiled code adds to it itself.
        """
        counting = self.max_cache_len is not None and not self._keeps_counter(key_states)
        return self._append(key_states, value_states, counting)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor, counting: bool
    ) -> tuple[SideSegments, SideSegments]:
        keys, values = self._accept(key_states, value_states)
        storage = self.storage
        assert storage is not None
        if isinstance(storage, StaticStorage) and not storage.is_step(keys.shape[2]):
            self._renumber()
        return storage.append(keys, values, self.cumulative_length if counting else None)

    def _accept(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values in the dtypes that the layer holds, without gradients, and a storage for them.

        Raises where they do not fit; those that are like the ones before them do.
        """
        like = None
        if type(keys) is type(values) is torch.Tensor:
            like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        if like is None or like != self._accepted:
            storage = self.storage
            check_states(self.index, keys, values, {} if storage is None else storage.dense_parts)
            self._check_arrival(keys, values)
            if storage is None or (keys.shape[0] != self.batch_size and storage.empty):
                self.lazy_initialization(keys, values)
            assert self.storage is not None
            check_batch(keys.shape[0], self.batch_size)
            held = self._widened(keys.dtype, values.dtype)
            as_held = held == (keys.dtype, values.dtype)
            keys, values = keys.to(held[0]), values.to(held[1])
            self._accepted = like if as_held else None
        elif self.max_cache_len is not None:
            self._check_arrival(keys, values)
        return keys.detach() if keys.requires_grad else keys, values.detach() if values.requires_grad else values

    def _check_arrival(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Refuses what a fixed capacity has no room for, or cannot pack, but in steps that may not wait."""
        storage, count = self.storage, keys.shape[2]
        if self.max_cache_len is None or (isinstance(storage, StaticStorage) and storage.is_step(count)):
            return
        if self._length() + count > self.max_cache_len:
            raise full_error(self.index, self.max_cache_len)
        self._checks.raise_for_known()
        if keys.numel():
            self._checks.add("keys", keys)
            self._checks.add("values", values)

    def _widened(self, keys: torch.dtype, values: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of dense tokens, made to lose nothing of these, as a concatenation would."""
        assert self.storage is not None
        k_held, v_held = (x.dtype for x in self.storage.dense_parts.values())
        if (k_held, v_held) == (keys, values):
            return keys, values
        wider = torch.promote_types(k_held, keys), torch.promote_types(v_held, values)
        if wider != (k_held, v_held):
            with self.edited() as storage:
                storage.widen(*wider)
        return wider

    def dense_step(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`append` with what the step attends to decoded, `[B, H, T, D]`."""
        step = Step(*self.append(key_states, value_states), self.backend, self.max_cache_len)
        return step.dense("keys"), step.dense("values")

    def step(self) -> Step:
        """All that the layer holds, as a step of a few tokens that was stored last attends to it."""
        assert self.storage is not None
        return Step(*self.storage.segments(), self.backend, self.max_cache_len)

    def raise_for_known(self) -> None:
        """Raises where tokens that were packed on a GPU are by now known not to be finite."""
        self._checks.raise_for_known()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a query of this length will meet."""
        return self.max_cache_len or self._length() + query_length, 0

    def get_seq_length(self) -> Any:
        """Tokens so far; with a fixed capacity a tensor, as in Transformers' static layers, for compiled code."""
        if self.max_cache_len is not None:
            return self.cumulative_length if self.is_initialized else 0
        return self._length()

    def _length(self) -> int:
        return 0 if self.storage is None else self.storage.tokens

    def get_max_length(self) -> int:
        """The fixed capacity; -1 for a layer that grows without a limit."""
        return self.max_cache_len or -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Empties the layer; the next update starts anew, with fresh statistics."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. Exact within the tail; a packed group that is cut is decoded.

        Where Transformers itself still crops to a length, a positive count is that length.
        """
        length = self._length()
        left = tokens_after_crop(tokens_to_remove, length)
        if self.storage is not None and left < length:
            with self.edited() as storage:
                storage.crop(left)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.storage is not None:
            with self.edited() as storage:
                storage.apply(change)
            self.batch_size = self.storage.dense_parts["keys"].shape[0]

    @contextmanager
    def edited(self) -> Iterator[DynamicStorage]:
        """The layer's tokens, to be changed in the block; after an error steps of fixed shapes are as they were."""
        assert self.storage is not None
        self._renumber()
        with self._writable_buffers(), self.storage.as_dynamic() as storage:
            yield storage
        if self.max_cache_len is not None:
            self.cumulative_length.fill_(self._length())

    def _renumber(self) -> None:
        """Before a change of steps of fixed shapes: a recorded CUDA graph knows the old buffers alone."""
        self._accepted = None
        if isinstance(self.storage, StaticStorage) and not self.storage.empty:
            self.number = ops.register(self, self.number)
