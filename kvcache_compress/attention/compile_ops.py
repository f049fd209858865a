"""Operators that stand for a compressed layer in a graph of `torch.compile`, so that it has no breaks.

While a model is traced, `CompressedLayer.update` puts the operator `append` into the graph and returns handles of a
`TracedStep`; the attention function adds `attend`, and any other code that touches a handle adds `read`, which returns
dense tensors. Prompts and unfused steps get dense tensors from the operator `update`. When the compiled code runs, the
operators find their layer by number: its state is Python's and cannot pass through the graph. Each takes what `append`
returned, which keeps them in order.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_compress.codecs.mask import AttentionCall, Mask

from .handle import PackedKV
from .path import TILED, AttentionPath

if TYPE_CHECKING:
    from kvcache_compress.cache.layer import CompressedLayer
    from kvcache_compress.codecs.base import Side

_LAYERS: weakref.WeakValueDictionary[int, CompressedLayer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(2)
"""Numbers of layers, from 2 on: a compiler treats 0 and 1 as constants."""


def register(layer: CompressedLayer, instead_of: int | None = None) -> int:
    """Return a new number by which compiled code finds this layer; its number `instead_of` becomes invalid."""
    if instead_of is not None:
        _LAYERS.pop(instead_of, None)
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def _factors(layer: CompressedLayer) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return cos and sin of the step for the graph to carry: compiled code does not see attributes set in tracing."""
    return (None, None) if layer.track is None else layer.track.take()


def traced_step(
    layer: CompressedLayer, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> tuple[PackedKV, PackedKV]:
    """Add to the graph that keys and values `[B, H, n, D]` are appended, and return handles of all `tokens`."""
    step = TracedStep(layer.number, append(keys, values, *_factors(layer), layer.number), keys, values, tokens)
    return PackedKV(step, "keys"), PackedKV(step, "values")


def decoded(
    layer: CompressedLayer, keys: torch.Tensor, values: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `traced_step`, but return the tokens that the step attends to decoded, `[B, H, tokens, D]`."""
    return update(keys, values, *_factors(layer), layer.number, tokens)


@dataclass(slots=True)
class TracedStep:
    """Stand-in for a `Step` while a model is traced.

    Args:
        number: the layer's number (`register`).
        appended: the result of the operator `append`, which orders the others after it.
        keys, values: the step's own, `[B, H, n, D]`.
        tokens: number of tokens in the layer, the step's own included.
    """

    number: int
    appended: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tokens: int

    @property
    def packed(self) -> None:
        """None: the number of packed tokens is known only when the code runs."""
        return None

    def _fresh(self, side: Side) -> torch.Tensor:
        return self.keys if side == "keys" else self.values

    def shape(self, side: Side) -> torch.Size:
        batch, heads, _, dim = self._fresh(side).shape
        return torch.Size((batch, heads, self.tokens, dim))

    def dtype(self, side: Side) -> torch.dtype:
        return self._fresh(side).dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def dense(self, side: Side) -> torch.Tensor:
        return read(self.appended, self._fresh(side), self.number, self.tokens, side)

    writable = dense

    def without_spare_capacity(
        self, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return both sides decoded with their spare capacity, since no shape may depend on the number of tokens."""
        return self.dense("keys"), self.dense("values"), mask

    def path(self, call: AttentionCall) -> AttentionPath:
        """Return any path, in place of the one that the operator chooses when it runs."""
        return TILED

    def attend(self, call: AttentionCall, path: AttentionPath | None = None) -> torch.Tensor:
        """Add the attention of `Step.attend` to the graph; its path is chosen when the code runs."""
        mask, width = call.mask.tensor, self.values.shape[3]
        return attend(
            call.query, self.appended, mask, call.s_aux, call.scaling, call.softcap or 0.0, self.number, width
        )


def _layer(number: int, cos: torch.Tensor | None, sin: torch.Tensor | None) -> CompressedLayer:
    layer = _LAYERS[number]
    if layer.track is not None and cos is not None and sin is not None:
        layer.track.inputs = (cos, sin)
    return layer


@torch.library.custom_op("kvcache_compress::append", mutates_args=())
def append(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, number: int
) -> torch.Tensor:
    """Append new keys and values `[B, H, n, D]` to a layer, and return an empty tensor for later operators to take."""
    _layer(number, cos, sin).append(keys, values)
    return keys.new_empty(0)


@append.register_fake
def _(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, number: int
) -> torch.Tensor:
    return keys.new_empty(0)


@torch.library.custom_op("kvcache_compress::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    appended: torch.Tensor,
    mask: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float,
    number: int,
    width: int,
) -> torch.Tensor:
    """Attend with queries `[B, Hq, n, Dk]` to a layer after the step of `appended`: `[B, n, Hq, width]`."""
    return _LAYERS[number].step().attend(AttentionCall(query, Mask(mask), scaling, softcap or None, s_aux))


@attend.register_fake
def _(
    query: torch.Tensor,
    appended: torch.Tensor,
    mask: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    scaling: float,
    softcap: float,
    number: int,
    width: int,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], width)


@torch.library.custom_op("kvcache_compress::read", mutates_args=())
def read(appended: torch.Tensor, fresh: torch.Tensor, number: int, tokens: int, side: str) -> torch.Tensor:
    """Decode a side of a layer, `[B, H, tokens, D]`; `fresh` `[B, H, n, D]` are its newest tokens."""
    return _LAYERS[number].step().dense("keys" if side == "keys" else "values")


@read.register_fake
def _(appended: torch.Tensor, fresh: torch.Tensor, number: int, tokens: int, side: str) -> torch.Tensor:
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
    """Append new keys and values `[B, H, n, D]`, and decode all that the step attends to: `[B, H, tokens, D]`."""
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
