"""Views: keys or values of a layer as stored, which `update()` returns instead of tensors."""

from __future__ import annotations

import copy
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.codecs.device import on_device
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.modeling.rope import Rope

from .adaptive.eras import Era, runs
from .packed_store import PackedStore
from .shared.rope_track import RopeTrack
from .shared.slots import Slots

_warn_once = cache(logging.getLogger(__name__).warning)
DECODE_CHUNK_TOKENS = 2048
"""Packed tokens decoded at a time, a multiple of every group size."""


class AttentionPath(ABC):
    """A way to attend to packed tokens: a back end, or tiles of decoded tokens.

    Attributes:
        takes_token_masks: True if `attend` takes masks of static layers over tokens, not over slots.
        takes_padding_masks: True if `attend` takes masks `[B, T]` as they are.
    """

    name: str
    takes_token_masks: bool = False
    takes_padding_masks: bool = False

    @abstractmethod
    def path(self, call: AttentionCall, keys: View, values: View) -> AttentionPath | None:
        """Return the path for this call, or None if the model's own attention over decoded tokens is better."""

    @abstractmethod
    def attend(self, call: AttentionCall, keys: View, values: View) -> torch.Tensor:
        """Attend to a layer: `[B, n, Hq, Dv]` in the query's dtype, zero for queries that see no token.

        The call's mask is over stored tokens, or over slots unless `takes_token_masks`.
        """


class Owner(Protocol):
    """The part of a layer that views and compiled steps use, described in `CompressedLayer`."""

    decoder_config: Any
    number: int
    track: RopeTrack | None

    @property
    def fused(self) -> bool: ...
    @property
    def awaits_queries(self) -> bool: ...
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[View, View]: ...
    def views(self) -> tuple[View, View]: ...
    def close(self, call: AttentionCall | None) -> None: ...
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]: ...


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class View:
    """Keys or values that a step attends to, its own tokens included: `sinks | packed | tail`, oldest first.

    A view reports the shape of the tensor that it stands for. Any other use by foreign code decodes it; writing into
    the result does not change the layer.

    Attributes:
        sinks: dense, `[B, H, sinks, D]`.
        store: the packed fields.
        packed: number of packed tokens of this step; in a static layer on a GPU, the packed capacity.
        tail_buffer: `[B, H, capacity, D]`, of which the first `tail_tokens` are the tail; contiguous except in a first
            prompt.
        eras: statistics of the packed tokens, oldest first.
        track: cos and sin of the packed groups, if the codec needs them.
        slots: slots of a static layer, if the view covers all slots, filled or not.
        padding: left padding of the rows, whose first tokens have swapped with it; None if there is none.
        backend: the layer's back end.
        capacity: `max_cache_len` of a static layer, the length of its masks; else None.
        owner: the layer, as long as it holds exactly this step's tokens; None afterwards and in copies.
        awaited_queries: True if packing had to wait for this step's queries.
    """

    sinks: torch.Tensor
    store: PackedStore
    packed: int
    tail_buffer: torch.Tensor
    tail_tokens: int
    eras: tuple[Era, ...]
    track: RopeTrack | None = None
    slots: Slots | None = None
    padding: LeftPadding | None = None
    backend: AttentionPath | None = None
    capacity: int | None = None
    owner: Owner | None = None
    awaited_queries: bool = False

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """State of a copy, which is tied to no layer."""
        return None, {field.name: getattr(self, field.name) for field in fields(self)} | {"owner": None}

    @property
    def codec(self) -> Codec:
        """Codec of the newest era."""
        return self.eras[-1].codec

    @property
    def side(self) -> Side:
        return self.codec.context.side

    @property
    def tail(self) -> torch.Tensor:
        return self.tail_buffer[:, :, : self.tail_tokens]

    @property
    def tokens(self) -> int:
        """Number of stored tokens, or of slots."""
        return self.sinks.shape[2] + self.packed + self.tail_tokens

    @property
    def shape(self) -> torch.Size:
        """Shape `[B, H, T, D]` of the tensor that the view stands for; `T` is the capacity of a static layer."""
        batch, heads, _, dim = self.sinks.shape
        return torch.Size((batch, heads, self.capacity or self.tokens, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.tail_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.tail_buffer.device

    @property
    def ndim(self) -> int:
        return 4

    def path(self, call: AttentionCall, values: View) -> AttentionPath | None:
        """Choose how to attend to these keys and `values`; None means the model's own attention over decoded tokens."""
        assert self.backend is not None
        return self.backend.path(call, self, values)

    def attend(self, call: AttentionCall, values: View, path: AttentionPath | None = None) -> torch.Tensor:
        """Attend to these keys and `values`: `[B, n, Hq, Dv]`.

        The call's mask is over tokens, including a static layer's spare capacity. Without `path`, `self.path` chooses;
        if that is None, the layer's back end attends.
        """
        path = path or self.path(call, values) or self.backend
        assert path is not None
        if call.mask.tensor is not None or self.slots is not None or self.padding is not None:
            call = replace(call, mask=self._stored_mask(call, path))
        with on_device(call.query):
            return path.attend(call, self, values)

    def close(self, call: AttentionCall) -> None:
        """Let the layer pack tokens that had to wait for this call's queries."""
        if self.awaited_queries and self.owner is not None and self.owner.awaits_queries:
            self.owner.close(replace(call, mask=self.over_tokens(call.mask)))

    def over_tokens(self, mask: Mask) -> Mask:
        """Trim a mask to the stored tokens."""
        return mask if self.capacity is None or self.slots is not None else mask.trimmed(self.tokens)

    def _stored_mask(self, call: AttentionCall, path: AttentionPath) -> Mask:
        """Convert the call's mask to one over stored tokens, or over slots, as the path takes it."""
        mask, count, slots, padding = call.mask, call.query.shape[2], self.slots, self.padding
        device = call.query.device
        if slots is not None:
            if padding is not None:
                mask = mask.exchanged(padding, slots.sinks, count, slots.capacity, device, slots.length)
            if not (path.takes_token_masks and self.packed):
                return mask.reordered(*slots.tokens(), count, slots.length)
            if mask.tensor is None or mask.is_by_query:
                return mask
            return Mask(mask.spelled_out(count, slots.capacity, device, slots.length))
        if padding is not None:  # swap before trimming, so that all layers share the swapped mask
            mask = mask if mask.is_by_query else self.over_tokens(mask)
            return self.over_tokens(mask.exchanged(padding, self.sinks.shape[2], count, self.tokens, device))
        mask = self.over_tokens(mask)
        return mask if path.takes_padding_masks else mask.by_query(count, self.tokens)

    def rope(self, start: int, stop: int) -> Rope | None:
        """Return cos and sin of the groups of packed tokens `[start, stop)`, or None without a track."""
        return None if self.track is None else self.track.read(start, stop)

    def dense(self) -> torch.Tensor:
        """Decode all tokens in order to a new tensor of this `shape` in the model's dtype; spare capacity is zero."""
        stored = self.stored()
        spare = self.shape[2] - stored.shape[2]
        return torch.nn.functional.pad(stored, (0, 0, 0, spare)) if spare else stored

    def dense_with_step(self, states: torch.Tensor, start: torch.Tensor | int) -> torch.Tensor:
        """Decode as `dense`, with the step's own tokens `[B, H, n, D]` from `start` on, which gradients then reach."""
        at = torch.arange(states.shape[2], device=states.device) + start
        return self.dense().index_copy(2, at, states.to(self.dtype))

    def stored(self) -> torch.Tensor:
        """Decode as `dense`, but drop spare capacity unless only the device knows the number of tokens."""
        batch, heads, first, dim = self.sinks.shape
        if not self.packed:
            whole = torch.cat([self.sinks, self.tail], dim=2)
        else:
            whole = self.tail_buffer.new_empty(batch, heads, self.tokens, dim)
            whole[:, :, :first] = self.sinks
            self.decode_into(whole[:, :, first : first + self.packed], 0)
            whole[:, :, first + self.packed :] = self.tail
        if self.slots is not None:
            whole = self.slots.by_token(whole)
        if self.padding is not None:
            self.padding.exchange_(whole.mT, first, None if self.slots is None else self.slots.length)
        return whole

    def decoded_tile(self, start: int, stop: int) -> torch.Tensor:
        """Decode packed tokens `[start, stop)`, whole groups, to the model's dtype; tile 0 includes the sinks."""
        sinks = self.sinks[:, :, : None if start == 0 else 0]
        batch, heads, first, dim = sinks.shape
        tile = self.tail_buffer.new_empty(batch, heads, first + stop - start, dim)
        tile[:, :, :first] = sinks
        self.decode_into(tile[:, :, first:], start)
        return tile

    def decode_into(self, out: torch.Tensor, start: int) -> None:
        """Decode packed tokens from `start` on, whole groups, into `out` `[B, H, tokens, D]`."""
        stop = start + out.shape[2]
        for begin in range(start, stop, DECODE_CHUNK_TOKENS):
            end = min(begin + DECODE_CHUNK_TOKENS, stop)
            for codec, first, last in runs(self.eras, begin, end):
                with on_device(out):
                    part = codec.decode(self.store.read(first, last), self.rope(first, last))
                out[:, :, first - start : last - start] = part

    def release(self, kept: int | None) -> bool:
        """Copy the tokens that the layer is about to change; True if packed tokens had to be copied too.

        The layer may keep only its first `kept` tokens; None means that packed tokens stay as they are.
        """
        if self.owner is not None:
            self.owner = None
            self.sinks = self.sinks.clone()
            self.tail_buffer = self.tail_buffer.clone(memory_format=torch.contiguous_format)
            self.track = copy.copy(self.track)
            if self.slots is not None:
                self.slots = replace(self.slots, rows=self.slots.rows.clone())
        whole = kept is not None and self.packed > 0 and self.sinks.shape[2] + self.packed > kept
        if whole:  # the layer overwrites packed tokens only after a crop, so copy them only then
            self.store = copy.copy(self.store)
            self.store.apply(torch.clone)
            if self.track is not None:
                self.track.buffer = self.track.buffer.clone()
        return whole

    def _decoded(self) -> torch.Tensor:
        """Decode for code that is not ours, with a warning if that code is a model's attention."""
        if self.owner is not None and not torch.compiler.is_compiling():
            _warn_once(
                "fused attention has no effect on %s: its attention transforms the cached keys and values itself, so "
                "each step decodes them. Results are right, but not faster. To avoid this message, call "
                "disable_fused_attention(model), or compress with fused=False",
                self.owner.decoder_config.model_type,
            )
        return self.dense()

    def to(self, target: Any, *args: Any, **kwargs: Any) -> View | torch.Tensor:
        """Return the view itself if it is on device `target` already, as a tensor would; else decode and move it."""
        if isinstance(target, torch.device) and target == self.device and not args and not kwargs.get("dtype"):
            return self
        return self._decoded().to(target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} and torch.Tensor have no attribute {name!r}")
        return getattr(self._decoded(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._decoded()[index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(View, View._decoded, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"View({self.side}, shape={tuple(self.shape)}, packed={self.packed})"


class HandedOut:
    """Views that a layer handed out, for as long as somebody uses them; a copy has none."""

    def __init__(self) -> None:
        self._views: list[weakref.ref[View]] = []

    def __reduce__(self) -> tuple[type[HandedOut], tuple[()]]:
        return HandedOut, ()

    def add(self, owner: Owner, *views: View) -> None:
        self._views, awaits = [view for view in self._views if view() is not None], owner.awaits_queries
        for view in views:
            view.owner, view.awaited_queries = owner, awaits
            self._views.append(weakref.ref(view))

    def release(self, kept: int | None = None) -> None:
        """Copy the content of views still in use, before a change that may keep only the first `kept` tokens."""
        if self._views:
            self._views = [one for one in self._views if (view := one()) is not None and not view.release(kept)]


def _decoding(name: str) -> Callable[..., Any]:
    def operator(view: View, *operands: Any) -> Any:
        return getattr(view._decoded(), name)(*operands)

    return operator


# Python looks up operators on the class and bypasses `__getattr__`.
_OPERATORS = "add sub mul truediv matmul radd rsub rmul rtruediv neg iter pow floordiv lt le gt ge eq ne"
for _name in _OPERATORS.split():
    setattr(View, f"__{_name}__", _decoding(f"__{_name}__"))
