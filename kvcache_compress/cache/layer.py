"""A compressed cache layer: Transformers' layer interface over a storage of `sinks | packed | tail`."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from kvcache_compress.attention import compile_ops as ops
from kvcache_compress.attention.interface import is_fused
from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import CompressionConfig, LayerPlan
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.adaptive.bit_budget import BitBudget
from kvcache_compress.storage.checks import CROPS_TO_LENGTH, PackableChecks, check_states, full_error, tokens_after_crop
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.shared.padding import PaddingRecord
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.side import FLUSH_TOKENS, MAX_DRAFT_TOKENS, SideState, Windows
from kvcache_compress.storage.static import StaticStorage
from kvcache_compress.storage.view import HandedOut, View


class CompressedLayer(CacheLayerMixin):
    """Cache of a full-attention layer whose older tokens are encoded, by one codec per side.

    With `compression.max_cache_len` all buffers are allocated before the first token, masks and decoded tokens have
    that length (unused positions are zero), and statistics come from the first prompt. On a GPU, steps have fixed
    shapes and cannot raise: tokens that are not finite or too many raise at the next operation that is not a step.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self, index: int, plan: LayerPlan, compression: CompressionConfig, decoder_config: PreTrainedConfig,
        rope: RopeLayout | None = None, track: RopeTrack | None = None, padding: PaddingRecord | None = None,
        budget: BitBudget | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.compression = compression
        self.max_cache_len = capacity = compression.max_cache_len
        self.is_compileable = capacity is not None  # shapes then stay the same, and `generate` compiles the forward
        if capacity is not None:
            # Window buffers are allocated at once, so windows must not be larger than the cache.
            sinks, recent = min(plan.sink_tokens, capacity), min(plan.recent_tokens, capacity)
            plan = replace(plan, sink_tokens=sinks, recent_tokens=recent)
        self.plan = plan
        self.decoder_config = decoder_config
        self.rope = rope
        self.track = track
        self.padding = padding or PaddingRecord()
        self.budget = budget
        self.record_past = False
        self._forget()

    def _forget(self) -> None:
        self.is_initialized = False
        self.number = ops.register(self, getattr(self, "number", None))
        self.storage: DynamicStorage | StaticStorage | None = None
        if self.budget is not None:
            self.budget.forget(self.index)
        self.checks = PackableChecks(self.index)
        self._accepted: tuple[Any, ...] | None = None
        self.handed_out = HandedOut()
        for name in ("batch_size", "cumulative_length"):  # attributes of the tokens that are gone
            self.__dict__.pop(name, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Build codecs and an empty storage for tensors like these, `[B, H, T, D]`."""
        with self._writable_buffers():
            if self.budget is not None:
                self.budget.forget(self.index)
            self.dtype, self.device = key_states.dtype, key_states.device
            self.batch_size = key_states.shape[0]
            self._accepted = None
            if self.track is not None:
                self.track = self.track.at(self.device, self.index)
            self.storage = storage = self._new_storage({"keys": key_states.detach(), "values": value_states.detach()})
            self.backend, self.group, self.flush_tokens = storage.backend, storage.windows.group, storage.windows.flush
            if self.max_cache_len is not None:
                self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
                torch._dynamo.mark_static_address(self.cumulative_length)
            self._take_over(storage)
        self.is_initialized = True

    def _new_storage(self, inputs: dict[Side, torch.Tensor]) -> DynamicStorage:
        """Build codecs and an empty storage for keys and values like these, `[B, H, T, D]`."""
        codecs = self.plan.codecs(inputs, self.index, self.compression.seed, self.rope)
        kinds = ((type(codec), codec.options, side) for side, codec in codecs.items())
        backend = resolve_backend(self.compression.backend, self.device, kinds)
        group = math.lcm(*(codec.group for codec in codecs.values()))
        flush = math.lcm(FLUSH_TOKENS, group)
        windows = Windows(self.plan.sink_tokens, self.plan.recent_tokens, flush, group, self.max_cache_len)
        sides = {
            side: SideState(backend.bind(codec), inputs[side], windows, backend, self.track, self.padding)
            for side, codec in codecs.items()
        }
        return DynamicStorage(
            sides, windows, self.checks, backend, flushes_steps=self.compression.quantize_generated, track=self.track,
            leads_track=self.track is None or self.track.leader == self.index, budget=self.budget,
        )  # fmt: skip

    def _writable_buffers(self) -> AbstractContextManager[Any]:
        """Leave inference mode if the capacity is fixed, because buffers are later written outside of it too."""
        leaves = self.max_cache_len is not None and torch.is_inference_mode_enabled()
        return torch.inference_mode(False) if leaves else nullcontext()

    def _take_over(self, storage: DynamicStorage) -> None:
        """Use this storage, or a `StaticStorage` with its tokens if steps have static shapes."""
        old = self.storage
        static = isinstance(old, StaticStorage) or (
            storage.windows.capacity is not None and self.backend.has_static_steps(self.device)
        )
        if not static or not StaticStorage.is_loadable(storage):
            self.storage = storage
        elif isinstance(old, StaticStorage) and old.fits(storage):
            old.load(storage)
        else:
            self.storage = StaticStorage(storage)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy and give it a number of its own for compiled code."""
        self.__dict__.update(state)
        self.number = ops.register(self)

    @property
    def sides(self) -> dict[Side, SideState]:
        """Keys and values, read-only (see `edited`); empty before the first update."""
        return {} if self.storage is None else self.storage.sides

    @property
    def fused(self) -> bool:
        """True if steps attend to views."""
        config = self.decoder_config
        if torch.compiler.is_compiling():
            return is_fused(config._attn_implementation)
        # Bypass the config's own attribute lookup, which takes 3 us in every layer and step.
        return is_fused(object.__getattribute__(config, "_attn_implementation_internal"))

    @property
    def awaits_queries(self) -> bool:
        """True if packing must wait until `close` brings the step's queries."""
        return isinstance(self.storage, DynamicStorage) and self.storage.awaits_queries

    @property
    def packed_tokens(self) -> int:
        return 0 if self.storage is None else self.storage.packed_tokens

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, decoded to a new tensor `[B, H, T, D]`; None before the first update.

        Writing into that tensor does not change the layer.
        """
        return self._dense("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """All values, decoded, as `keys`."""
        return self._dense("values")

    def _dense(self, side: Side) -> torch.Tensor | None:
        if self.storage is None:
            return None
        if self.storage.dense_like["keys"].device != self.device:
            self.prefetch()
        if self.compression.offloading and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return replace(self.storage.sides[side].view(), capacity=None).dense()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | View, torch.Tensor | View]:
        """Store keys and values `[B, H, T, D]` and return the keys and values that this step attends to.

        With fused attention these are views, once tokens are packed or if a codec needs the step's queries. Otherwise
        they are plain tensors. With gradients they are plain too; gradients reach this step's keys and values only.

        Raises:
            ValueError: the batch size changes, the tokens exceed the static capacity, or tokens to be packed are not
                finite. The cache is unchanged. On a GPU a later update raises, since the check must not stall.
        """
        if torch.compiler.is_compiling():
            found = ops.trace(self, key_states, value_states)
            if self.max_cache_len is not None and self._keeps_counter(key_states):
                self.cumulative_length.add_(key_states.shape[2])
            return found
        capacity, storage = self.max_cache_len, self.storage
        first = capacity is None and (storage is None or not storage.tokens)
        keys, values = self._append(key_states, value_states, counting=capacity is not None)
        gradients = (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled()
        fused, awaits = self.fused and not gradients, self.awaits_queries
        if awaits and not fused:
            self.close(None)
        if fused and (awaits or (not first and (keys.packed or capacity is not None))):
            self.handed_out.add(self, keys, values)
            return keys, values
        if first and key_states.device.type == "cpu":  # attention over strided bfloat16 takes 8 % longer there
            return key_states.contiguous(), value_states.contiguous()
        if first:
            return key_states, value_states
        if not gradients:
            return keys.dense(), values.dense()
        count = key_states.shape[2]
        start: Any = keys.tokens - count
        if capacity is not None:
            start = (self.cumulative_length - count).clamp(max=capacity - count)
        return keys.dense_with_step(key_states, start), values.dense_with_step(value_states, start)

    def _keeps_counter(self, key_states: torch.Tensor) -> bool:
        """True if the layer keeps its counter tensor; compiled code then adds the step's tokens to it itself."""
        return self.is_initialized and bool(key_states.shape[0] == self.batch_size > 0)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[View, View]:
        """Store keys and values `[B, H, T, D]` for compiled code, and return what this step attends to.

        With a static capacity, compiled code adds to the counter itself, unless the counter is new.
        """
        counting = self.max_cache_len is not None and not self._keeps_counter(key_states)
        views = self._append(key_states, value_states, counting)
        self.close(None)
        return views

    def close(self, call: AttentionCall | None) -> None:
        """End a step: pack the tokens that had to wait for its queries. `call` is None if the queries were not seen.

        If layers share keys and values, the first one that attends closes the step; later calls do nothing.
        """
        storage = self.storage
        if not isinstance(storage, DynamicStorage) or not storage.awaits_queries:
            return
        away = storage.due is not None and storage.dense_like["keys"].device != self.device
        if away:
            self.prefetch()
        with self._writable_buffers():
            storage.close(call)
            self._take_over(storage)
        if away:
            self.offload()

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor, counting: bool) -> tuple[View, View]:
        keys, values = self._accept(key_states, value_states)
        self.close(None)
        storage = self.storage
        assert storage is not None
        self.handed_out.release()
        if isinstance(storage, StaticStorage):
            if storage.is_step(keys.shape[2]):
                return storage.append(keys, values, self.cumulative_length if counting else None)
            self._renumber()
            storage = storage.as_dynamic()
        held = MAX_DRAFT_TOKENS if self.record_past else 0
        views = storage.append(keys, values, self.cumulative_length if counting else None, held)
        if self.max_cache_len is not None and storage.due is None:
            with self._writable_buffers():
                self._take_over(storage)
        return views

    def _accept(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Check new keys and values, make a storage if there is none, and return them in its dtypes, detached.

        Tensors with the shapes, dtypes and devices of the last step are not checked again.
        """
        like = None
        if type(keys) is type(values) is torch.Tensor:
            like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        if like is None or like != self._accepted:
            storage = self.storage
            check_states(self.index, keys, values, *((storage.dense_like, storage.empty) if storage else ()))
            self._check_arrival(keys, values)
            if storage is None or keys.shape[0] != self.batch_size:
                self.lazy_initialization(keys, values)
            assert self.storage is not None
            held, given = [x.dtype for x in self.storage.dense_like.values()], [keys.dtype, values.dtype]
            wider = held if held == given else list(map(torch.promote_types, held, given))
            if wider != held:  # the dense tokens held must not lose anything either
                with self.edited() as storage:
                    storage.widen(*wider)
            self._accepted = like if wider == given else None
            keys, values = keys.to(wider[0]), values.to(wider[1])
        elif self.max_cache_len is not None:
            self._check_arrival(keys, values)
        return keys.detach() if keys.requires_grad else keys, values.detach() if values.requires_grad else values

    def _check_arrival(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Check tokens against a static capacity and for NaN, except in steps that may not wait for the result."""
        storage, count = self.storage, keys.shape[2]
        if self.max_cache_len is None or (isinstance(storage, StaticStorage) and storage.is_step(count)):
            return
        if self._length() + count > self.max_cache_len:
            raise full_error(self.index, self.max_cache_len)
        self.checks.raise_for_known()
        if keys.numel():
            self.checks.add("keys", keys)
            self.checks.add("values", values)

    def views(self) -> tuple[View, View]:
        """Views of all keys and values, as a step of a few tokens attends to them right after it is stored."""
        assert self.storage is not None
        return self.storage.views()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will attend to."""
        return self.max_cache_len or self._length() + query_length, 0

    def get_seq_length(self) -> Any:
        """Number of cached tokens; with a static capacity a tensor, as in Transformers' static layers."""
        if self.max_cache_len is not None:
            return self.cumulative_length if self.is_initialized else 0
        return self._length()

    def _length(self) -> int:
        return 0 if self.storage is None else self.storage.tokens

    def get_max_length(self) -> int:
        """The static capacity; -1 for a layer that grows without limit."""
        return self.max_cache_len or -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Expect crops after prompts too: the last `MAX_DRAFT_TOKENS` of a prompt may be a draft and stay dense."""
        self.record_past = True

    def reset(self) -> None:
        """Empty the layer; the next update starts anew, with new statistics."""
        self.handed_out.release()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; a packed group that the crop cuts is decoded into the tail.

        In releases of Transformers whose `crop` takes a length, a positive number is that length.
        """
        if tokens_to_remove == 0 and not CROPS_TO_LENGTH:
            return
        length = self._length()
        left = tokens_after_crop(tokens_to_remove, length)
        if self.storage is not None and left < length:
            self.handed_out.release(left)
            with self.edited() as storage:
                storage.crop(left)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace row i of the batch by row `beam_idx[i]`."""
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        self._select(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` (integers or a boolean mask) selects."""
        self._select(lambda x: x[indices.to(x.device) if isinstance(indices, torch.Tensor) else indices])

    def _select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.handed_out.release()
        self._apply(change)

    def offload(self) -> None:
        """Move all buffers to the CPU; views that a step returned stay on the device."""
        self._apply(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move offloaded buffers back to the layer's device."""
        if self.is_initialized:
            self._apply(lambda x: x.to(self.device, non_blocking=True))

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every buffer `[B, ...]` by `change(buffer)`."""
        if self.storage is not None:
            with self.edited() as storage:
                storage.apply(change)
            self.batch_size = self.storage.dense_like["keys"].shape[0]

    @contextmanager
    def edited(self) -> Iterator[DynamicStorage]:
        """Give access to the layer's tokens for changes in the block; an error leaves a `StaticStorage` unchanged."""
        assert self.storage is not None
        self._renumber()
        with self._writable_buffers():
            storage = self.storage.as_dynamic()
            yield storage
            self._take_over(storage)
        if self.max_cache_len is not None:
            self.cumulative_length.fill_(self._length())

    def _renumber(self) -> None:
        """Give the layer a new number before its buffers change, since recorded CUDA graphs refer to the old ones."""
        self._accepted = None
        if isinstance(self.storage, StaticStorage) and not self.storage.empty:
            self.number = ops.register(self, self.number)
