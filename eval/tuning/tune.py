"""Share a budget out among the sides of layers, and certify the config that comes of it on other text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvcache_compress.cache.estimate import BF16_BYTES, ModelShape, constant_bytes, packed_bits, rope_bytes, side_bytes
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.eval.studies.probe_layers import Window
from kvcache_compress.eval.studies.probe_rules import with_plans

from .sensitivity import Sensitivity, Sides

STEPS = 64
"""Steps per byte in which costs are counted, rounded up: groups of up to 128 tokens share bytes."""


@dataclass(frozen=True)
class Budget:
    """Bytes per token and key/value head that the sides of all layers may take together, scalars counted."""

    bytes_per_token: float

    @classmethod
    def of_bits(cls, bits: float, base: CompressionConfig, shape: ModelShape) -> Budget:
        """From bits per packed number, with the cos and sin that layers share."""
        numbers = 2 * shape.head_dim * shape.layers
        sides = sum(side_bytes(plan, shape.head_dim) for plan in base.plan(["full_attention"] * shape.layers))
        shared = packed_bits(base, shape.head_dim, shape.layers, shape.kv_heads) * numbers / 8 - sides
        return cls(bits * numbers / 8 - shared)

    @classmethod
    def of_memory(cls, memory: float, tokens: int, batch: int, base: CompressionConfig, shape: ModelShape) -> Budget:
        """From the bytes of a whole cache of `batch` sequences of so many tokens, everything counted.

        Raises:
            ValueError: the memory does not hold the tokens that stay dense.
        """
        dense = min(tokens, base.sink_tokens + base.recent_tokens)
        fixed = batch * shape.layers * shape.kv_heads * dense * 2 * shape.head_dim * BF16_BYTES
        fixed += batch * rope_bytes(base, shape.head_dim, shape.layers, tokens)
        fixed += constant_bytes(base, shape.layers, shape.kv_heads, shape.head_dim)
        if memory <= fixed or tokens <= dense:
            raise ValueError(
                f"memory={memory:g} bytes for {batch} x {tokens} tokens: {fixed:g} are taken by what does not depend "
                f"on the bits, of them {dense} tokens per sequence that stay dense"
            )
        return cls((memory - fixed) / (batch * shape.kv_heads * (tokens - dense)))

    def bits(self, shape: ModelShape) -> float:
        """Bits per number of what the sides may take."""
        return 8 * self.bytes_per_token / (2 * shape.head_dim * shape.layers)


def least_bits(choices: Sides, shape: ModelShape) -> float:
    """Bits per number of the cheapest choices of all layers."""
    return sum(8 * min(_cost(x, side, shape.head_dim) for x in choices[side]) / (2 * shape.head_dim) for side in SIDES)


@dataclass(frozen=True)
class Tuned:
    """A config with bits by layer and side, beside the best one with the same bits in all layers.

    expected, expected_uniform: sums of the measured losses, nats per token.
    """

    config: CompressionConfig
    uniform: CompressionConfig
    expected: float
    expected_uniform: float


def tune(sensitivity: Sensitivity, base: CompressionConfig, choices: Sides, head_dim: int, budget: Budget) -> Tuned:
    """Choose the bits of each side of each layer for the least sum of losses within a budget.

    Raises:
        ValueError: the budget is less than the cheapest choices take.
    """
    costs = {side: [_cost(choice, side, head_dim) for choice in choices[side]] for side in SIDES}
    sides = [(layer, side) for layer in sensitivity.plans for side in SIDES]
    losses = [[sensitivity.loss(layer, side, n) for n in range(len(costs[side]))] for layer, side in sides]
    chosen = allocate(
        [[math.ceil(cost * STEPS - 1e-9) for cost in costs[side]] for _, side in sides], losses,
        math.floor(budget.bytes_per_token * STEPS + 1e-9),
    )  # fmt: skip
    plans = dict(sensitivity.plans)
    for (layer, side), number in zip(sides, chosen, strict=True):
        choice = choices[side][number]
        plans[layer] = replace(plans[layer], **{side: choice})
    config = with_plans(base.model_copy(update={"layers": []}), plans)
    expected = sum(of_side[number] for of_side, number in zip(losses, chosen, strict=True))
    layers = len(sensitivity.plans)
    pairs = [
        (sensitivity.curves["keys"][i] + sensitivity.curves["values"][j], i, j)
        for i, key_cost in enumerate(costs["keys"])
        for j, value_cost in enumerate(costs["values"])
        if layers * (key_cost + value_cost) <= budget.bytes_per_token + 1e-9
    ]
    expected_uniform, i, j = min(pairs)
    uniform = base.model_copy(update={"keys": choices["keys"][i], "values": choices["values"][j], "layers": []})
    return Tuned(config, uniform, expected, expected_uniform)


def _cost(choice: SideConfig, side: Side, head_dim: int) -> float:
    return bytes_per_token(choice.codec().layout(choice.options(), side, head_dim))


@dataclass(frozen=True)
class Certificate:
    """A cache's loss against the full cache over windows of a text, in nats per token.

    kl, kl_stderr: mean, and its standard error over windows (None for one).
    kl_999: the KL that one token in a thousand exceeds.
    top1: share of tokens after which the most likely one is the full cache's.
    perplexity: of the text.
    bits: measured bits per packed number; 16 if nothing was packed.
    """

    kl: float
    kl_stderr: float | None
    kl_999: float
    top1: float
    perplexity: float
    bits: float


def certify(windows: Sequence[Callable[[], Window]], configs: Sequence[CompressionConfig]) -> list[Certificate]:
    """Measure caches of some configs on windows, each of which is prefilled once."""
    found: list[list[_Scores]] = [[] for _ in configs]
    for make in windows:
        window = make()
        for records, config in zip(found, configs, strict=True):
            nll, kl, same, measured = window.certify(config)
            records.append(_Scores(nll, kl, same, measured.packed_bits))
    return [_certificate(records) for records in found]


class _Scores(NamedTuple):
    """Scores of a window by token, and measured bits."""

    nll: torch.Tensor
    kl: torch.Tensor
    same: torch.Tensor
    bits: float


def _certificate(records: Sequence[_Scores]) -> Certificate:
    kl = torch.cat([record.kl for record in records])
    means = [record.kl.mean().item() for record in records]
    return Certificate(
        kl=kl.mean().item(),
        kl_stderr=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        kl_999=torch.quantile(kl, 0.999).item(),
        top1=torch.cat([record.same for record in records]).double().mean().item(),
        perplexity=torch.cat([record.nll for record in records]).mean().exp().item(),
        bits=statistics.fmean(record.bits for record in records),
    )
