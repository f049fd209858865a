"""Bits by layer and side: a cache spends one budget where coding errors change the output of attention most.

The loss of a side is the squared error that it causes in its layer's attention output over the output's square, both
summed over heads and over some queries of the first prompt. A bit more divides it by four. A layer chooses its bits as
soon as it is measured, so that nothing stays dense for others, and expects those that follow to be like those before.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache_compress.codecs.base import SIDES, Codec, Prompt, Side
from kvcache_compress.codecs.layout import bytes_per_token

from .eras import attention, real_tokens, sampled_groups

SAMPLED_TOKENS = 256
"""Tokens of which errors are measured."""
HALF_SURE = 256
"""Tokens with which a measured loss counts as much as the mean of all layers, in its logarithm."""
BITS_APART = 2
"""Largest difference between chosen bits and those of the config."""


class Measured(NamedTuple):
    """A measured layer.

    Attributes:
        pairs: bits of keys and values among which it chooses.
        costs: bytes per token of each pair.
        factors: what the losses of keys and of values are multiplied by with each pair, `[2, pairs]`.
        losses: losses of keys and of values with the config's bits.
        sure: 0 to 1, how far the losses are to be trusted.
    """

    pairs: list[tuple[float, float]]
    costs: np.ndarray
    factors: np.ndarray
    losses: np.ndarray
    sure: float


class BitBudget:
    """Bytes per token that the layers of a cache may spend together, as many as with the config's bits.

    Args:
        planned: bytes per token and head of each layer with the config's bits.
    """

    def __init__(self, planned: Mapping[int, float]) -> None:
        self.planned = dict(planned)
        self.spent: dict[int, float] = {}
        """Bytes per token of the layers that have chosen."""
        self._measured: dict[int, Measured] = {}

    def forget(self, layer: int) -> None:
        """Forget a layer's measurement and choice, since it is empty again."""
        self.spent.pop(layer, None)
        self._measured.pop(layer, None)

    def spend(self, layer: int, codecs: Mapping[Side, Codec]) -> None:
        """Count the bytes of a layer that keeps its codecs."""
        self.spent[layer] = sum(bytes_per_token(codec.fields) for codec in codecs.values())

    def choose(
        self, layer: int, codecs: Mapping[Side, Codec], losses: Mapping[Side, float], tokens: int
    ) -> dict[Side, Codec]:
        """Codecs with the bits for a layer whose sides lose this much with `codecs`, as measured on `tokens` tokens."""
        keys, values = (_choices(codecs[side]) for side in SIDES)
        pairs = [(key, value) for key in keys for value in values]
        costs = np.array([keys[key][0] + values[value][0] for key, value in pairs])
        factors = np.array([[keys[key][1] for key, _ in pairs], [values[value][1] for _, value in pairs]])
        own = np.maximum([losses[side] for side in SIDES], 1e-30)
        found = self._measured[layer] = Measured(pairs, costs, factors, own, tokens / (tokens + HALF_SURE))
        others = self.planned.keys() - self.spent.keys() - {layer}
        left = sum(self.planned.values()) - sum(self.spent.values())
        mean = np.exp(np.mean([np.log(one.losses) for one in self._measured.values()]))
        price = self._price(layer, left, len(others), mean) if others else 0.0
        fitting = np.where(costs <= left - len(others) * costs.min(), _losses(found, mean) + price * costs, np.inf)
        chosen = zip(SIDES, pairs[int(fitting.argmin())], strict=True)
        found_codecs = {side: codecs[side].with_bits(bits) for side, bits in chosen}
        self.spend(layer, found_codecs)
        return found_codecs

    def _price(self, layer: int, left: float, others: int, mean: float) -> float:
        """Loss per byte at which `layer` and `others` layers like the measured ones would spend `left` bytes."""
        losses = {index: _losses(one, mean) for index, one in self._measured.items()}
        high = float(max(of.max() for of in losses.values()))
        low = 1e-9 * high
        for _ in range(16):
            price = (low * high) ** 0.5
            spent = {
                index: one.costs[(losses[index] + price * one.costs).argmin()] for index, one in self._measured.items()
            }
            fits = spent[layer] + others * np.mean([*spent.values()]) <= left
            low, high = (low, price) if fits else (price, high)
        return high


def _losses(layer: Measured, mean: float) -> np.ndarray:
    """Loss of each pair; the fewer tokens were measured, the nearer to `mean`, that of all layers and sides."""
    pulled: np.ndarray = mean * (layer.losses / mean) ** layer.sure
    return pulled @ layer.factors


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
