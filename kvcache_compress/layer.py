"""One compressed layer: `sinks | packed | tail`, and every operation that Transformers performs on a cache layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from . import ops
from .backend import resolve_backend
from .checks import PackableChecks, check_batch, check_states, tokens_after_crop
from .codec import Codec, CodecContext, Side
from .config import CompressionConfig, LayerPlan, SideConfig
from .gradients import wanted, with_step
from .rope import RopeLayout
from .rope_track import RopeTrack
from .row_operations import RowOperations
from .side import SideState, append, begin, crop, flush, pack, triton_encoder
from .view import MAX_DECODE_TOKENS, PackedKV, SideSegments

ATTENTION_NAME = "kvcache_compress"
"""Name under which our attention is registered; `update()` returns `PackedKV` while a decoder's config bears it."""
FLUSH_TOKENS = 32
"""Tokens that leave the recent window together, so that the cost of encoding is spread over as many steps."""


class CompressedLayer(RowOperations):
    """A full-attention layer's cache whose older tokens are encoded by one codec per side.

    New tokens go to `tail`. Once `FLUSH_TOKENS` more than `recent_tokens` are there, the oldest are encoded and
    appended to `packed`, where they are never touched again. A step attends to its own tokens, and to all that were
    dense when it began, in full precision.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        index: int,
        plan: LayerPlan,
        config: CompressionConfig,
        decoder_config: PreTrainedConfig,
        rope: RopeLayout | None = None,
        track: RopeTrack | None = None,
        leads_track: bool = True,
    ) -> None:
        self.index = index
        self.plan = plan
        self.config = config
        self.decoder_config = decoder_config
        self.rope = rope
        self.track = track
        self.leads_track = leads_track
        self._forget()

    def _forget(self) -> None:
        self.is_initialized = False
        self.number = ops.register(self, getattr(self, "number", None))
        self._sides: dict[Side, SideState] = {}
        self._checks = PackableChecks(self.index)
        self._accepted: tuple[Any, ...] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Builds codecs and empty buffers for tensors like these, `[B, H, T, D]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self._accepted = None
        if self.track is not None:
            self.track = self.track.at(self.device, self.index)
            self.leads_track = self.track.leader == self.index
        given: dict[Side, torch.Tensor] = {"keys": key_states.detach(), "values": value_states.detach()}
        codecs = {side: self._codec(side, self.plan.side(side), x) for side, x in given.items()}
        self.backend = resolve_backend(self.config.backend, self.device, codecs.values())
        codecs = {side: codec.on(self.backend) for side, codec in codecs.items()}
        self.group = math.lcm(*(codec.group for codec in codecs.values()))
        self.flush_tokens = math.lcm(FLUSH_TOKENS, self.group)
        usual = self.plan.recent_tokens + self.flush_tokens
        self._sides = {
            side: SideState(codec, given[side], usual, self.track if self.plan.rope_use(side) == "factors" else None)
            for side, codec in codecs.items()
        }
        self.is_initialized = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another layer to compiled code."""
        self.__dict__.update(state)
        self.number = ops.register(self)

    def _codec(self, side: Side, config: SideConfig, states: torch.Tensor) -> Codec:
        context = CodecContext(
            side=side, head_dim=states.shape[-1], heads=states.shape[1], layer=self.index, seed=self.config.seed,
            sink_tokens=self.plan.sink_tokens, dtype=states.dtype, device=states.device, rope=self.rope,
        )  # fmt: skip
        return config.codec()(config.options(), context)

    @property
    def sides(self) -> dict[Side, SideState]:
        """The two sides; empty before the first update."""
        return self._sides

    @property
    def fused(self) -> bool:
        config = self.decoder_config
        if torch.compiler.is_compiling():
            return bool(config._attn_implementation == ATTENTION_NAME)
        # The same without the config's own look at each attribute, which takes 3 us: every layer asks at every step.
        return bool(object.__getattribute__(config, "_attn_implementation_internal") == ATTENTION_NAME)

    @property
    def packed_tokens(self) -> int:
        return self._sides["keys"].store.tokens if self._sides else 0

    @property
    def spare(self) -> tuple[torch.Tensor, ...]:
        """Tensors in the model's dtype that are held beside the two sides."""
        return ()

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, decoded: `[B, H, T, D]`. None before the first update."""
        return self._dense("keys")

    @property
    def values(self) -> torch.Tensor | None:
        """All values, as `keys`."""
        return self._dense("values")

    def _dense(self, side: Side) -> torch.Tensor | None:
        if not self._sides:
            return None
        self.prefetch()
        if self.config.offloading and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self._sides[side].everything().dense()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | PackedKV, torch.Tensor | PackedKV]:
        """Stores `[B, H, T, D]` keys and values and returns what this step attends to.

        Plain tensors while nothing is packed, while fused attention is off, or for gradients, which reach these keys
        and values but none of an earlier step; else `PackedKV`.

        Raises:
            ValueError: another batch size than before, or tokens to be packed that are not finite. The cache is
                unchanged (on a GPU, where waiting for the check would stall, a later update raises).
        """
        if torch.compiler.is_compiling():
            return self._update_when_run(key_states, value_states)
        length = self._host_length()
        keys, values = self.store(key_states, value_states)
        if not length:
            return key_states, value_states
        # Asked by every layer at every step: a function would cost more than what it asks.
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            return with_step(keys.dense(), key_states, length), with_step(values.dense(), value_states, length)
        if self.fused and keys.packed:
            return PackedKV(keys, values, "keys", self.backend), PackedKV(keys, values, "values", self.backend)
        return keys.dense(), values.dense()

    def _update_when_run(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor | PackedKV, torch.Tensor | PackedKV]:
        """`update` while the model is traced: what the compiled code will do when it runs."""
        if wanted(key_states, value_states):
            raise ValueError(
                "gradients of keys and values: allowed where the model is not compiled, else torch.no_grad()"
            )
        tokens = key_states.shape[2]
        total = self.get_mask_sizes(tokens)[0]
        if self.fused and tokens <= MAX_DECODE_TOKENS:
            return ops.pending(self, key_states, value_states, total)
        return ops.decoded(self, key_states, value_states, total)

    def store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[SideSegments, SideSegments]:
        """`update` without a view: stores `[B, H, T, D]` and returns the segments that this step attends to."""
        keys, values = self._accept(key_states, value_states)
        tokens = keys.shape[2]
        prompt = tokens > MAX_DECODE_TOKENS
        self._checks.raise_for_known()
        if self.track is not None:
            self.track.extend(self._host_length(), keys, again=not self.leads_track)
        if not prompt and self.config.quantize_generated:
            self._flush_tail()
        k_side, v_side = self._sides.values()
        sinks = min(self.plan.sink_tokens - k_side.sinks.shape[2], tokens)
        packed = k_side.store.tokens
        if prompt:
            k_tail, v_tail = self._append_prompt(keys, values, sinks)
            return k_side.segments(packed, k_tail, k_tail.shape[2]), v_side.segments(packed, v_tail, v_tail.shape[2])
        append(self._sides, keys, values, sinks, self.backend)
        return k_side.everything(), v_side.everything()

    def _accept(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values in the dtypes that the layer holds, without gradients, and the layer ready for them.

        Raises where they do not fit; those that are like the ones before them do.
        """
        like = None
        if type(keys) is type(values) is torch.Tensor:
            like = (keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device)
        if like is None or like != self._accepted:
            self._check_shapes(keys, values)
            if not self.is_initialized or (keys.shape[0] != self.batch_size and not self._host_length()):
                self.lazy_initialization(keys, values)
            check_batch(keys.shape[0], self.batch_size)
            k_side, v_side = self._sides.values()
            k_side.widen(keys.dtype)
            v_side.widen(values.dtype)
            held = k_side.sinks.dtype, v_side.sinks.dtype
            as_held = held == (keys.dtype, values.dtype)
            keys, values = keys.to(held[0]), values.to(held[1])
            if not self._host_length():
                first: dict[Side, torch.Tensor] = {"keys": keys.detach(), "values": values.detach()}
                begin(self._sides, first, self._checks, self.plan.sink_tokens, self.plan.recent_tokens)
            self._accepted = like if as_held else None
        return keys.detach() if keys.requires_grad else keys, values.detach() if values.requires_grad else values

    def dense_step(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`store` with what the step attends to decoded, `[B, H, T, D]`."""
        keys, values = (side.dense() for side in self.store(key_states, value_states))
        return keys, values

    def view(self, side: Side) -> PackedKV:
        """All that the layer holds, as a step of a few tokens that was stored last attends to it."""
        keys, values = (state.everything() for state in self._sides.values())
        return PackedKV(keys, values, side, self.backend)

    def _append_prompt(self, keys: torch.Tensor, values: torch.Tensor, sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends a part of a prompt, and packs at once what the recent window does not hold; both tails with all.

        Those of the first part are views of it, since no step attends to them: that saves a copy of the prompt.
        """
        tails: dict[Side, torch.Tensor] = {"keys": keys[:, :, sinks:], "values": values[:, :, sinks:]}
        if self._host_length():
            tails = {side: torch.cat([self._sides[side].tail.view(), x], 2) for side, x in tails.items()}
        leaving = self._leaving(tails["keys"].shape[2])
        if leaving:
            self._check_packable(tails, leaving)
            append(self._sides, keys[:, :, :sinks], values[:, :, :sinks], sinks, self.backend)
            pack(self._sides, tails, leaving, self.config.quantize_generated)
        else:
            append(self._sides, keys, values, sinks, self.backend)
        return tails["keys"], tails["values"]

    def _flush_tail(self) -> None:
        leaving = self._leaving(self._sides["keys"].tail.tokens)
        if not leaving:
            return
        states = self._sides.values()
        if all(state.prepared and triton_encoder(state.codec) for state in states):
            flush(self._sides, leaving, self._checks)
        else:
            tails = {side: state.tail.view() for side, state in self._sides.items()}
            self._check_packable(tails, leaving)
            pack(self._sides, tails, leaving, growing=True)

    def _leaving(self, tail_tokens: int) -> int:
        return max(0, tail_tokens - self.plan.recent_tokens) // self.flush_tokens * self.flush_tokens

    def _check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        check_states(self.index, keys, values, {side: state.sinks for side, state in self._sides.items()})

    def _check_packable(self, tails: dict[Side, torch.Tensor], leaving: int) -> None:
        """Raises for what is about to be encoded, and for all of what a codec is about to be prepared with."""
        for side, x in tails.items():
            self._checks.add(side, x[:, :, :leaving] if self._sides[side].prepared else x)

    def raise_for_known(self) -> None:
        """Raises where tokens that were packed on a GPU are by now known not to be finite."""
        self._checks.raise_for_known()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a query of this length will meet."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._host_length()

    def _host_length(self) -> int:
        if not self._sides:
            return 0
        keys = self._sides["keys"]
        return int(keys.sinks.shape[2]) + keys.store.tokens + keys.tail.tokens

    def get_max_length(self) -> int:
        """-1: the layer grows without a limit."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Empties the layer; the next update starts anew, with fresh statistics."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. Exact within the tail; a packed group that is cut is decoded.

        Where Transformers itself still crops to a length, a positive count is that length.
        """
        left = tokens_after_crop(tokens_to_remove, self._host_length())
        if self._sides and left < self._host_length():
            self._accepted = None
            crop(self._sides, left, self.group)

    def _apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._accepted = None
        for state in self._sides.values():
            state.apply(change)
        if self._sides:
            self.batch_size = self._sides["keys"].sinks.shape[0]
