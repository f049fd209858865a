"""Base class of back ends: how a layer encodes tokens and attends on one kind of device.

The operations here use plain PyTorch; a back end overrides those that it does faster.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch

from kvcache_compress.codecs.base import Codec, Fields, Side
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.modeling.rope import Rope

from .side import MAX_DECODE_TOKENS, SideState
from .view import AttentionPath, View

ENCODE_CHUNK_TOKENS = 4096
"""Tokens encoded at a time, a multiple of every group size; bounds the memory that a long prompt needs."""


class Backend(AttentionPath):
    """Operations of a layer's steps. Stateless, so layers share one instance; configs choose it by its `name`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def problem(self) -> str | None:
        """Return why the back end cannot run on this machine, or None."""
        return None

    @abstractmethod
    def runs_on(self, device: torch.device, asked: bool = False) -> bool:
        """True if it runs on tensors of this device; `asked` adds devices for which `auto` never chooses it."""

    def supports(self, codec: type[Codec], options: Any, side: Side) -> bool:
        """True if it has what a codec of this class with these options needs for one side."""
        return True

    def bind(self, codec: Codec) -> Codec:
        """Copy the codec so that it encodes with this back end's functions (`Codec.native`)."""
        return codec.with_native(None)

    def encoded(self, codec: Codec, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        """Encode whole groups of tokens `[B, H, T, D]` into new fields."""
        with on_device(x):
            return codec.encode(x, rope)

    def pack(self, state: SideState, x: torch.Tensor, tokens: int, growing: bool) -> None:
        """Encode the first `tokens` of `x` into the store; the first call takes statistics from all of `x`."""
        store = state.store
        state.prepare(x, state.sinks.shape[2])
        store.ensure_capacity(tokens, growing)
        for start in range(0, tokens, ENCODE_CHUNK_TOKENS):
            part = x[:, :, start : min(start + ENCODE_CHUNK_TOKENS, tokens)]
            count = part.shape[2]
            rope = state.rope(store.tokens, store.tokens + count)
            store.append(self.encoded(state.codec, part, rope), count, growing)

    def has_static_steps(self, device: torch.device) -> bool:
        """True if static layers use steps of static shapes on this device; CPUs gain nothing from them."""
        return device.type != "cpu"

    def ready(self, sides: Mapping[Side, SideState]) -> None:
        """Make what later steps of static shapes keep (`Codec.ready`)."""
        for state in sides.values():
            with on_device(state.sinks):
                state.codec.ready()

    def step(
        self, storage: Any, fresh: Mapping[Side, torch.Tensor], counter: torch.Tensor | None, rope: Rope | None
    ) -> None:
        """Run one step of a `StaticStorage`, as its own `step` does."""
        with on_device(storage.counts):
            storage.step(fresh, counter, rope)

    def step_pages(self, storage: Any, step: Any, fresh: Mapping[Side, torch.Tensor]) -> None:
        """Store the tokens of a `Step`'s decode steps, as `PagedStorage.step` does."""
        storage.step(step, fresh)

    attends_to_pages = False
    """True if it has `attend_to_pages`."""

    def attend_to_pages(
        self, call: AttentionCall, keys: View, values: View, rows: torch.Tensor, page: int
    ) -> torch.Tensor:
        """Attend with one query for each of several sequences, `[n, Hq, 1, D]`, to pages of `page` tokens.

        Rows of the views' dense tokens are slots, those of their fields are blocks. `rows` `[n, 4 + pages]` has each
        sequence's slot, its sinks, packed and tail tokens, and its blocks.
        """
        raise NotImplementedError

    def takes(self, call: AttentionCall, keys: View, values: View) -> bool:
        """True if `attend` is a fast way for this call to attend to packed tokens."""
        return call.query.shape[2] <= MAX_DECODE_TOKENS
