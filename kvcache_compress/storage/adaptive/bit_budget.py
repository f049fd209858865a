"""Bits by layer and side: a cache spends one budget where coding errors change the output of attention most.

The loss of a side is the squared error that it causes in its layer's attention output over the output's square, both
summed over heads and over some queries of the first prompt. A bit more divides it by four. A layer chooses its bits as
soon as it is measured, so that nothing stays dense for others, and expects those that follow to be like those before.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

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


class BitBudget:
    """Bytes per token that some layers of a cache may spend together, as many as with the config's bits.

    Args:
        layers: numbers of the layers.
        planned: bytes per token and head that each has with the config's bits.
    """

    def __init__(self, layers: Collection[int], planned: float) -> None:
        self.layers, self.planned = frozenset(layers), planned
        self.spent: dict[int, float] = {}
        """Bytes per token of the layers that have chosen."""
        self._losses: dict[int, tuple[np.ndarray, float]] = {}
        """Losses of keys and of values with the config's bits, and how far they are to be trusted, from 0 to 1."""

    def forget(self, layer: int) -> None:
        """Forget all choices if this layer has chosen: it is empty again, so another prompt begins."""
        if layer in self.spent:
            self.spent.clear()
            self._losses.clear()

    def spend(self, layer: int, codecs: Mapping[Side, Codec]) -> None:
        """Count the bytes of a layer that uses these codecs."""
        self.spent[layer] = sum(bytes_per_token(codec.fields) for codec in codecs.values())

    def choose(
        self, layer: int, codecs: Mapping[Side, Codec], losses: Mapping[Side, float], tokens: int
    ) -> dict[Side, Codec]:
        """Choose a layer's bits and return its codecs with them; `spend` counts them when they are used.

        Args:
            layer: the layer.
            codecs: its codecs with the config's bits.
            losses: what its sides lose with them.
            tokens: number of tokens that were measured.
        """
        sides = [(type(codecs[side]), codecs[side].options, side, codecs[side].context.head_dim) for side in SIDES]
        keys, values = (_choices(*one) for one in sides)
        pairs = [(key, value) for key in keys for value in values]
        costs = np.array([keys[key][0] + values[value][0] for key, value in pairs])
        factors = np.array([[keys[key][1] for key, _ in pairs], [values[value][1] for _, value in pairs]])
        own = np.maximum([losses[side] for side in SIDES], 1e-30)
        self._losses.pop(layer, None)  # it comes last
        self._losses[layer] = own, tokens / (tokens + HALF_SURE)
        measured, sure = (np.array(x) for x in zip(*self._losses.values(), strict=True))
        mean = np.exp(np.log(measured).mean())
        # The fewer tokens were measured, the nearer to the mean of all layers and sides. [layers, pairs]
        expected = mean * (measured / mean) ** sure[:, None] @ factors
        others = len(self.layers - self.spent.keys() - {layer})
        left = self.planned * len(self.layers) - sum(self.spent.values())
        price = _price(expected, costs, others, left) if others else 0.0
        fitting = np.where(costs <= left - others * costs.min(), expected[-1] + price * costs, np.inf)
        chosen = pairs[int(fitting.argmin())]
        return {side: codecs[side].with_bits(bits) for side, bits in zip(SIDES, chosen, strict=True)}


def _price(losses: np.ndarray, costs: np.ndarray, others: int, left: float) -> float:
    """Loss per byte at which the last layer, and `others` like all measured ones, would spend `left` bytes."""
    high = float(losses.max())
    low = 1e-9 * high
    for _ in range(16):
        price = (low * high) ** 0.5
        spent = costs[(losses + price * costs).argmin(1)]
        low, high = (low, price) if spent[-1] + others * spent.mean() <= left else (price, high)
    return high


@lru_cache(maxsize=64)
def _choices(kind: Any, options: Any, side: Side, dim: int) -> dict[float, tuple[float, float]]:
    """Bytes per token, and what the loss is multiplied by, for each number of bits that a codec may have."""
    own = options.bits
    bits = [one for one in kind.bit_choices if abs(one - own) <= BITS_APART and not one * dim % 8]
    found = {}
    for one in [own, *bits] if own < bits[0] else bits:
        fields = kind.layout(options.model_copy(update={"bits": one}), side, dim)
        found[one] = bytes_per_token(fields), 4.0 ** (own - one)
    return found


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
