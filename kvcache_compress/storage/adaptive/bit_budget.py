"""Bits by layer and side: a cache spends one budget where coding errors change the output of attention most.

The loss of a side is the squared error that it causes in its layer's attention output over the output's square, both
summed over heads and over some queries of the first prompt. A bit more divides it by four. Layers choose their bits
once all are measured, so the first prompt stays dense until its last layer. A layer that cannot wait that long chooses
at once, and expects the others to be like those that were measured before it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache_compress.codecs.base import SIDES, Codec, Prompt, Side
from kvcache_compress.codecs.layout import bytes_per_token

from .eras import attention, real_tokens, sampled_groups

MOST_HELD = 8192
"""Most tokens of a first prompt, over the rows of its batch, that stay dense until its last layer is measured."""
SAMPLED_TOKENS = 256
"""Tokens of which errors are measured."""
HALF_SURE = 256
"""Tokens with which a measured loss counts as much as the mean of all layers, in its logarithm."""
BITS_APART = 2
"""Largest difference between chosen bits and those of the config."""


class Offer(NamedTuple):
    """A measured layer: what it may choose, and what takes its choice.

    Attributes:
        codecs: its codecs with the config's bits.
        pairs: bits of keys and values among which it chooses.
        costs: bytes per token of each pair.
        factors: what the losses of keys and of values are multiplied by with each pair, `[2, pairs]`.
        losses: losses of keys and of values with `codecs`.
        sure: 0 to 1, how far the losses are to be trusted.
        take: called with the chosen codecs.
    """

    codecs: Mapping[Side, Codec]
    pairs: list[tuple[float, float]]
    costs: np.ndarray
    factors: np.ndarray
    losses: np.ndarray
    sure: float
    take: Callable[[dict[Side, Codec]], None]


class BitBudget:
    """Bytes per token that the layers of a cache may spend together, as many as with the config's bits.

    Args:
        planned: bytes per token and head of each layer with the config's bits.
        most_held: most tokens of a layer, over all rows, that may stay dense until all layers are measured.
    """

    def __init__(self, planned: Mapping[int, float], most_held: int = MOST_HELD) -> None:
        self.planned, self.most_held = dict(planned), most_held
        self.spent: dict[int, float] = {}
        """Bytes per token of the layers that have chosen."""
        self.waiting: set[int] = set()
        """Layers that were measured and have not chosen."""
        self._offers: dict[int, Offer] = {}

    def forget(self, layer: int) -> None:
        """Forget a layer's measurement and choice, since it is empty again."""
        self.waiting.discard(layer)
        self.spent.pop(layer, None)
        self._offers.pop(layer, None)

    def spend(self, layer: int, codecs: Mapping[Side, Codec]) -> None:
        """Count the bytes of a layer that keeps its codecs."""
        self.spent[layer] = _bytes(codecs)
        self._choose_if_last(layer)

    def offer(
        self,
        layer: int,
        codecs: Mapping[Side, Codec],
        losses: Mapping[Side, float],
        take: Callable[[dict[Side, Codec]], None],
        tokens: int,
        rows: int = 1,
    ) -> None:
        """Take the losses of a layer's sides with these codecs; `take` is called with its new ones, now or later.

        They were measured on `tokens` tokens. The layer keeps those of `rows` rows dense until then; none in a step,
        when its tokens have been dense before.
        """
        keys, values = (_choices(codecs[side]) for side in SIDES)
        pairs = [(key, value) for key in keys for value in values]
        costs = [keys[key][0] + values[value][0] for key, value in pairs]
        factors = [[keys[key][1] for key, _ in pairs], [values[value][1] for _, value in pairs]]
        own = np.maximum([losses[side] for side in SIDES], 1e-30)
        sure = tokens / (tokens + HALF_SURE)
        self._offers[layer] = Offer(codecs, pairs, np.array(costs), np.array(factors), own, sure, take)
        self.waiting.add(layer)
        if tokens * rows > self.most_held:
            self.choose(layer)
        self._choose_if_last(layer)

    def choose(self, layer: int) -> None:
        """Choose the bits of a waiting layer."""
        offer, others = self._offers[layer], self.planned.keys() - self.spent.keys() - {layer}
        left = sum(self.planned.values()) - sum(self.spent.values())
        least = sum(self._offers.get(one, offer).costs.min() for one in others)
        mean = np.exp(np.mean([np.log(one.losses) for one in self._offers.values()]))
        price = self._price(left, mean) if others else 0.0
        fitting = np.where(offer.costs <= left - least, _losses(offer, mean) + price * offer.costs, np.inf)
        bits = offer.pairs[int(fitting.argmin())]
        chosen = {side: offer.codecs[side].with_bits(one) for side, one in zip(SIDES, bits, strict=True)}
        self.waiting.remove(layer)
        self.spent[layer] = _bytes(chosen)
        offer.take(chosen)

    def _choose_if_last(self, layer: int) -> None:
        """Let all waiting layers choose if this is the last one, or the last that was awaited."""
        if layer == max(self.planned) or self.planned.keys() <= self.spent.keys() | self.waiting:
            for one in sorted(self.waiting):
                self.choose(one)

    def _price(self, left: float, mean: float) -> float:
        """Loss per byte at which the layers that have not chosen would spend `left` bytes; `mean` as in `_losses`."""
        shape = len(self._offers), max(len(offer.pairs) for offer in self._offers.values())
        costs, losses = np.zeros(shape), np.full(shape, np.inf)
        for row, offer in enumerate(self._offers.values()):
            costs[row, : len(offer.pairs)], losses[row, : len(offer.pairs)] = offer.costs, _losses(offer, mean)
        waiting = np.array([layer in self.waiting for layer in self._offers])
        unknown = len(self.planned.keys() - self.spent.keys() - self.waiting)
        high = float(losses[np.isfinite(losses)].max())
        low = 1e-9 * high
        for _ in range(16):
            price = (low * high) ** 0.5
            chosen = np.take_along_axis(costs, (losses + price * costs).argmin(1)[:, None], 1)[:, 0]
            spent = chosen[waiting].sum() + unknown * chosen.mean()
            low, high = (low, price) if spent <= left else (price, high)
        return high


def _losses(offer: Offer, mean: float) -> np.ndarray:
    """Loss of each pair; the fewer tokens were measured, the nearer to `mean`, that of all layers and sides."""
    pulled: np.ndarray = mean * (offer.losses / mean) ** offer.sure
    return pulled @ offer.factors


def _bytes(codecs: Mapping[Side, Codec]) -> float:
    return sum(bytes_per_token(codec.fields) for codec in codecs.values())


def _choices(codec: Any) -> dict[float, tuple[float, float]]:
    """Bytes per token, and what the loss is multiplied by, for each number of bits that a side may have."""
    own, side, dim = codec.options.bits, codec.context.side, codec.context.head_dim
    bits = [one for one in codec.bit_choices if abs(one - own) <= BITS_APART and not one * dim % 8]
    options = {one: codec.options.model_copy(update={"bits": one}) for one in ([own, *bits] if own < bits[0] else bits)}
    return {one: (bytes_per_token(codec.layout(of, side, dim)), 4.0 ** (own - one)) for one, of in options.items()}


def output_losses(codecs: Mapping[Side, Codec], prompt: Prompt, values: torch.Tensor) -> dict[Side, float] | None:
    """Measure what each side's codec, which has its statistics, loses in a layer's attention output.

    Args:
        codecs: the layer's codecs.
        prompt: the layer's tokens, with queries.
        values: values of all its tokens, `[B, H, T, D]`.

    Returns:
        The losses; None if no query comes after the dense windows.
    """
    k_codec, v_codec = codecs["keys"], codecs["values"]
    keys, first = prompt.keys, prompt.sinks.shape[2]
    query, p, packed = attention(prompt)
    if not query.shape[2]:
        return None
    tokens, rope = sampled_groups(prompt, k_codec.group, 0, -(-SAMPLED_TOKENS // k_codec.group))
    real = real_tokens(prompt)[:, None, first + tokens].float()
    values = values.float()
    output, p = p @ values, torch.where(packed, p, 0.0)[..., first:].square()
    packed_values = values[:, :, first:]
    # Sums over tokens of p² |v|² and of p² |v - output|².
    lengths = (p @ packed_values.square().sum(-1, keepdim=True))[..., 0]
    size = output.square().sum(-1)
    distances = lengths - 2 * (output * (p @ packed_values)).sum(-1) + size * p.sum(-1)
    x, y = keys[:, :, tokens].float(), values[:, :, first + tokens]
    errors = k_codec.decode(k_codec.encode(x, rope), rope) - x
    mean = ((query @ errors.mT).square() * real[:, :, None]).sum(-1) / real.sum(-1).clamp_min(1)[..., None]
    key_losses = mean * distances
    errors = v_codec.decode(v_codec.encode(y)) - y
    share = (errors.square().sum(-1) * real).sum(-1) / (y.square().sum(-1) * real).sum(-1).clamp_min(1e-30)
    value_losses = share[..., None] * lengths
    norm = size.sum().clamp_min(1e-30)
    return {"keys": float(key_losses.sum() / norm), "values": float(value_losses.sum() / norm)}
