"""Bits by layer and side: a cache spends one budget where coding errors change the output of attention most.

The loss of a side is the squared error that it causes in its layer's attention output over the output's square, both
summed over heads and over some queries of the first prompt. A bit more divides it by four. Layers choose their bits
once all are measured, so the first prompt stays dense until its last layer. A layer that cannot wait that long chooses
at once, and expects the others to be like those that were measured before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcache_compress.codecs.base import SIDES, Codec, Prompt, Side
from kvcache_compress.codecs.layout import bytes_per_token

from .eras import attention

LEAST_TOKENS = 256
"""Fewest packed tokens with which bits are chosen."""
MOST_HELD = 8192
"""Most tokens of a first prompt that stay dense until its last layer is measured."""
SAMPLED_TOKENS = 256
"""Tokens of which errors are measured."""
BITS_APART = 2
"""Largest difference between chosen bits and those of the config."""


class Curve(NamedTuple):
    """Bytes per token and losses of the pairs of bits that a layer may choose."""

    costs: np.ndarray
    losses: np.ndarray

    def best(self, price: float) -> int:
        return int((self.losses + price * self.costs).argmin())


class Waiting(NamedTuple):
    """A layer that was measured and has not chosen: its codecs, its pairs of bits, and what takes the new codecs."""

    codecs: dict[Side, Codec]
    pairs: list[tuple[float, float]]
    settle: Callable[[dict[Side, Codec]], None]


class BitBudget:
    """Bytes per token that the layers of a cache may spend together, as many as with the config's bits.

    Args:
        planned: bytes per token and head of each layer with the config's bits.
        most_held: most tokens of a layer that may stay dense until all layers are measured.
    """

    def __init__(self, planned: Mapping[int, float], most_held: int = MOST_HELD) -> None:
        self.planned, self.most_held = dict(planned), most_held
        self.spent: dict[int, float] = {}
        self.waiting: dict[int, Waiting] = {}
        self._curves: dict[int, Curve] = {}

    def forget(self, layer: int) -> None:
        """Forget a layer's measurement and choice, since it is empty again."""
        for known in (self.spent, self.waiting, self._curves):
            known.pop(layer, None)

    def spend(self, layer: int, codecs: Mapping[Side, Codec]) -> None:
        """Count the bytes of a layer that keeps its codecs."""
        self.spent[layer] = _bytes(codecs)
        self._settle_if_known()

    def offer(
        self,
        layer: int,
        codecs: dict[Side, Codec],
        losses: Mapping[Side, float],
        settle: Callable[[dict[Side, Codec]], None],
        tokens: int,
    ) -> None:
        """Take the losses of a layer's sides with these codecs; `settle` is called when the new ones are chosen.

        That is at once if the layer holds too many `tokens`.
        """
        keys, values = (_choices(codecs[side], losses[side]) for side in SIDES)
        pairs = [(key, value) for key in keys[0] for value in values[0]]
        self._curves[layer] = Curve(*(np.add.outer(x, y).ravel() for x, y in zip(keys[1:], values[1:], strict=True)))
        self.waiting[layer] = Waiting(codecs, pairs, settle)
        if tokens > self.most_held:
            self.settle(layer)
        self._settle_if_known()

    def settle(self, layer: int) -> None:
        """Choose the bits of a waiting layer."""
        curve, others = self._curves[layer], self.planned.keys() - self.spent.keys() - {layer}
        left = sum(self.planned.values()) - sum(self.spent.values())
        least = sum(self._curves[one].costs.min() if one in self._curves else curve.costs.min() for one in others)
        price = self._price(left) if others else 0.0
        fitting = np.where(curve.costs <= left - least, curve.losses + price * curve.costs, np.inf)
        codecs, pairs, settle = self.waiting.pop(layer)
        pair = zip(codecs.items(), pairs[int(fitting.argmin())], strict=True)
        chosen = {side: codec.with_bits(bits) for (side, codec), bits in pair}
        self.spent[layer] = _bytes(chosen)
        settle(chosen)

    def _settle_if_known(self) -> None:
        if self.planned.keys() <= self.spent.keys() | self.waiting.keys():
            for layer in list(self.waiting):
                self.settle(layer)

    def _price(self, left: float) -> float:
        """Loss per byte at which the layers that have not chosen would spend `left` bytes."""
        unknown = len(self.planned.keys() - self.spent.keys() - self.waiting.keys())
        low, high = 1e-9, 1.0
        for _ in range(16):
            price = (low * high) ** 0.5
            costs = {layer: curve.costs[curve.best(price)] for layer, curve in self._curves.items()}
            spent = sum(costs[layer] for layer in self.waiting) + unknown * sum(costs.values()) / len(costs)
            low, high = (low, price) if spent <= left else (price, high)
        return high


def _bytes(codecs: Mapping[Side, Codec]) -> float:
    return sum(bytes_per_token(codec.fields) for codec in codecs.values())


def _choices(codec: Any, loss: float) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Bits among which a side may choose, their bytes per token, and their losses if the codec's own is `loss`."""
    own = codec.options.bits
    near = [one for one in codec.bit_choices if abs(one - own) <= BITS_APART]
    bits = [one for one in near if not one * codec.context.head_dim % 8]
    options = [codec.options.model_copy(update={"bits": one}) for one in bits]
    layouts = [codec.layout(one, codec.context.side, codec.context.head_dim) for one in options]
    return bits, np.array([bytes_per_token(fields) for fields in layouts]), loss * 4.0 ** (own - np.array(bits))


def output_losses(codecs: Mapping[Side, Codec], prompt: Prompt, values: torch.Tensor) -> dict[Side, float]:
    """Measure what each side's codec, which has its statistics, loses in a layer's attention output.

    Args:
        codecs: the layer's codecs.
        prompt: the layer's tokens, with queries.
        values: values of all its tokens, `[B, H, T, D]`.
    """
    k_codec, v_codec = codecs["keys"], codecs["values"]
    keys, first = prompt.keys, prompt.sinks.shape[2]
    groups = keys.shape[2] // k_codec.group
    chosen = torch.linspace(0, groups - 1, min(groups, -(-SAMPLED_TOKENS // k_codec.group)), device=keys.device)
    chosen = chosen.round().long()
    tokens = (chosen[:, None] * k_codec.group + torch.arange(k_codec.group, device=keys.device)).flatten()
    rope = None if prompt.rope is None else (prompt.rope[0][:, chosen], prompt.rope[1][:, chosen])
    query, p, packed = attention(prompt)
    values = values.float()
    output, p = p @ values, torch.where(packed, p, 0.0)[..., first:].square()
    size, lengths = output.square().sum(-1, keepdim=True), values[:, :, None, first:].square().sum(-1)
    apart = lengths - 2 * (output @ values[:, :, first:].mT) + size  # squared distances of values from the output
    x, y = keys[:, :, tokens].float(), values[:, :, first + tokens]
    missed = k_codec.decode(k_codec.encode(x, rope), rope) - x
    of_keys = (query @ missed.mT).square().mean(-1) * (p * apart).sum(-1)
    missed = v_codec.decode(v_codec.encode(y)) - y
    share = missed.square().sum((2, 3)) / y.square().sum((2, 3)).clamp_min(1e-30)
    of_values = share[..., None] * (p * lengths).sum(-1)
    norm = size.sum().clamp_min(1e-30)
    return {"keys": float(of_keys.sum() / norm), "values": float(of_values.sum() / norm)}
