"""Custom operators that keep compressed layers free of graph breaks under `torch.compile`.

A layer's state lives in Python and cannot pass through a graph, so the operators look their layer up by number when the
compiled code runs. `attend` and `read` take the result of `append` as an input, which fixes their order.
"""

import itertools
import weakref

import torch

from kvcache_compress.backends.tiled import TILED
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.storage.side import MAX_DECODE_TOKENS
from kvcache_compress.storage.view import AttentionPath, Owner, View

_LAYERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(2)
"""Layer numbers. They start at 2 because compilers treat 0 and 1 as constants."""


def register(layer: Owner, instead_of: int | None = None) -> int:
    """Return a new number for this layer and invalidate its old number `instead_of`."""
    if instead_of is not None:
        _LAYERS.pop(instead_of, None)
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def trace(layer: Owner, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor | View, torch.Tensor | View]:
    """Add the storing of keys and values `[B, H, n, D]` to the graph, and return those of all tokens.

    Steps with fused attention get views, with `append`, others decoded tensors `[B, H, T, D]`, with `update`.
    """
    if (keys.requires_grad or values.requires_grad) and torch.is_grad_enabled():
        raise ValueError(
            "compiled models cannot backpropagate through a compressed cache; use torch.no_grad() or run uncompiled"
        )
    tokens, _ = layer.get_mask_sizes(keys.shape[2])
    # Take cos and sin out of the layer, since compiled code does not see attributes set during tracing.
    factors = (None, None) if layer.track is None else layer.track.take()
    if not layer.fused or keys.shape[2] > MAX_DECODE_TOKENS:
        return update(keys, values, *factors, layer.number, tokens)
    appended = append(keys, values, *factors, layer.number)
    k_view = TracedView(layer.number, "keys", appended, keys, tokens)
    return k_view, TracedView(layer.number, "values", appended, values, tokens)


class TracedView(View):
    """A view for tracing. The number of packed tokens is unknown until the compiled code runs.

    It has the layer's `number`, the result of the operator `append`, the step's own tokens `fresh` `[B, H, n, D]`, and
    the number of tokens in the layer, including these.
    """

    __slots__ = ("appended", "number", "of")

    def __init__(self, number: int, of: Side, appended: torch.Tensor, fresh: torch.Tensor, tokens: int) -> None:
        self.number, self.of, self.appended = number, of, appended
        self.sinks = self.tail_buffer = fresh
        self.packed, self.capacity, self.owner, self.awaited_queries = 0, tokens, None, False

    @property
    def side(self) -> Side:
        return self.of

    def dense(self) -> torch.Tensor:
        return read(self.appended, self.sinks, self.number, self.shape[2], self.of)

    stored = dense  # graph shapes must not depend on the number of packed tokens

    def over_tokens(self, mask: Mask) -> Mask:
        return mask

    def path(self, call: AttentionCall, values: View) -> AttentionPath:
        """Return a placeholder: the path is chosen when the compiled code runs."""
        return TILED

    def attend(self, call: AttentionCall, values: View, path: AttentionPath | None = None) -> torch.Tensor:
        mask, width = call.mask.tensor, values.shape[3]
        return attend(
            call.query, self.appended, mask, call.s_aux, call.scaling, call.softcap or 0.0, self.number, width
        )


def _layer(number: int, cos: torch.Tensor | None, sin: torch.Tensor | None) -> Owner:
    layer = _LAYERS[number]
    if layer.track is not None and cos is not None and sin is not None:
        layer.track.inputs = (cos, sin)
    return layer


@torch.library.custom_op("kvcache_compress::append", mutates_args=())
def append(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, number: int
) -> torch.Tensor:
    """Append keys and values `[B, H, n, D]` to a layer; the empty result orders the operators that follow."""
    _layer(number, cos, sin).append(keys, values)
    return keys.new_empty(0)


append.register_fake(lambda keys, *_: keys.new_empty(0))


@torch.library.custom_op("kvcache_compress::attend", mutates_args=())
def attend(
    query: torch.Tensor, appended: torch.Tensor, mask: torch.Tensor | None, s_aux: torch.Tensor | None,
    scaling: float, softcap: float, number: int, width: int,
) -> torch.Tensor:  # fmt: skip
    """Attend with queries `[B, Hq, n, Dk]` to a layer; returns `[B, n, Hq, width]`."""
    keys, values = _LAYERS[number].views()
    return keys.attend(AttentionCall(query, Mask(mask), scaling, softcap or None, s_aux), values)


attend.register_fake(lambda query, *others: query.new_empty(query.shape[0], query.shape[2], query.shape[1], others[-1]))


@torch.library.custom_op("kvcache_compress::read", mutates_args=())
def read(appended: torch.Tensor, fresh: torch.Tensor, number: int, tokens: int, side: str) -> torch.Tensor:
    """Decode one side of a layer to `[B, H, tokens, D]`; `fresh` `[B, H, n, D]` gives shape, dtype and device."""
    return _LAYERS[number].views()[SIDES.index(side)].dense()


read.register_fake(lambda _, fresh, number, tokens, side: _longer(fresh, tokens))


@torch.library.custom_op("kvcache_compress::update", mutates_args=())
def update(
    keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None,
    number: int, tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Append keys and values `[B, H, n, D]`, then decode both sides to `[B, H, tokens, D]`."""
    k_view, v_view = _layer(number, cos, sin).append(keys, values)
    return k_view.dense(), v_view.dense()


update.register_fake(lambda keys, values, *others: (_longer(keys, others[-1]), _longer(values, others[-1])))


def _longer(x: torch.Tensor, tokens: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1], tokens, x.shape[3])
