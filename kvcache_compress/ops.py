"""What `torch.compile` sees of a compressed layer: a few operators, so that no graph break comes from us.

While a model is traced, `CompressedLayer.update` puts the operator `store` into the graph and returns `PendingKV`s; the
attention function adds `attend`, and any other code that touches a `PendingKV` adds `read`, which gives dense tensors.
Prompts and unfused steps get dense tensors from `update`. The operators find their layer by number when the compiled
code runs: its state is Python's and cannot pass through the graph. What `store` returns keeps them in order.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from .view import PackedKV

if TYPE_CHECKING:
    from .codec import Side
    from .layer import CompressedLayer

_LAYERS: weakref.WeakValueDictionary[int, CompressedLayer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(2)
"""From 2 on: a compiler treats 0 and 1 as constants."""


def register(layer: CompressedLayer, instead_of: int | None = None) -> int:
    """A number for this layer that no other has or had; its former one is not valid any more."""
    if instead_of is not None:
        _LAYERS.pop(instead_of, None)
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def _factors(layer: CompressedLayer) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """cos and sin of the step, which the graph must carry: attributes that are set while tracing are set too late."""
    return (None, None) if layer.track is None else layer.track.take()


def pending(
    layer: CompressedLayer, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> tuple[PendingKV, PendingKV]:
    """Has the step's keys and values `[B, H, n, D]` stored when the code runs, with which the layer has `tokens`."""
    stored = store(keys, values, *_factors(layer), layer.number)
    both = (keys, values)
    return PendingKV(layer.number, stored, both, tokens, "keys"), PendingKV(
        layer.number, stored, both, tokens, "values"
    )


def decoded(
    layer: CompressedLayer, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `pending`, with all `tokens` that the step attends to decoded, `[B, H, tokens, D]`."""
    return update(keys, values, *_factors(layer), layer.number, tokens)


class PendingKV(PackedKV):
    """The keys or the values of a layer in a step that is being traced."""

    __slots__ = ("both", "number", "stored", "tokens")

    def __init__(
        self, number: int, stored: torch.Tensor, both: tuple[torch.Tensor, torch.Tensor], tokens: int, side: Side
    ) -> None:
        self.backend = "torch"  # The operator finds the layer's own.
        self.number = number
        self.stored = stored
        self.both = both
        self.tokens = tokens
        self.side = side

    def _fresh(self) -> torch.Tensor:
        return self.both[self.side == "values"]

    @property
    def shape(self) -> torch.Size:
        batch, heads, _, dim = self._fresh().shape
        return torch.Size((batch, heads, self.tokens, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self._fresh().dtype

    @property
    def device(self) -> torch.device:
        return self._fresh().device

    def dense(self) -> torch.Tensor:
        return read(self.stored, self._fresh(), self.number, self.tokens, self.side)

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        width = self.both[1].shape[3]
        return attend(query, self.stored, mask, sinks, scaling, softcap or 0.0, self.number, width)

    def __repr__(self) -> str:
        return f"PendingKV({self.side}, shape={tuple(self.shape)})"


def _layer(number: int, cos: torch.Tensor | None, sin: torch.Tensor | None) -> CompressedLayer:
    layer = _LAYERS[number]
    if layer.track is not None and cos is not None and sin is not None:
        layer.track.given = (cos, sin)
    return layer


@torch.library.custom_op("kvcache_compress::store", mutates_args=())
def store(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, number: int
) -> torch.Tensor:
    """Stores new keys and values `[B, H, n, D]` in a layer; an empty tensor, for what reads the layer after that."""
    _layer(number, cos, sin).store(keys, values)
    return keys.new_empty(0)


@store.register_fake
def _(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, number: int
) -> torch.Tensor:
    return keys.new_empty(0)


@torch.library.custom_op("kvcache_compress::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    stored: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    number: int,
    width: int,
) -> torch.Tensor:
    """Attention of queries `[B, Hq, n, Dk]` over a layer, the step in `stored` included: `[B, n, Hq, width]`."""
    return _LAYERS[number].view("keys").attend(query, mask, scaling, softcap or None, sinks)


@attend.register_fake
def _(
    query: torch.Tensor,
    stored: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
    number: int,
    width: int,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], width)


@torch.library.custom_op("kvcache_compress::read", mutates_args=())
def read(stored: torch.Tensor, fresh: torch.Tensor, number: int, tokens: int, side: str) -> torch.Tensor:
    """A side of a layer decoded, `[B, H, tokens, D]`; `fresh` `[B, H, n, D]` is what was stored of it last."""
    return _LAYERS[number].view("keys" if side == "keys" else "values").dense()


@read.register_fake
def _(stored: torch.Tensor, fresh: torch.Tensor, number: int, tokens: int, side: str) -> torch.Tensor:
    return fresh.new_empty(fresh.shape[0], fresh.shape[1], tokens, fresh.shape[3])


@torch.library.custom_op("kvcache_compress::update", mutates_args=())
def update(
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    number: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores new keys and values `[B, H, n, D]`; all `tokens` that the step attends to decoded, `[B, H, tokens, D]`."""
    return _layer(number, cos, sin).dense_step(keys, values)


@update.register_fake
def _(
    keys: torch.Tensor,
    values: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    number: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads = keys.shape[:2]
    return keys.new_empty(batch, heads, tokens, keys.shape[3]), values.new_empty(batch, heads, tokens, values.shape[3])
