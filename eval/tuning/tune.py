"""Share a budget out among the sides of layers, and certify the config that comes of it on other text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvcache_compress.cache.estimate import ModelShape, packed_bits, side_bytes, total_bytes
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.eval.studies.probe_layers import Window
from kvcache_compress.eval.studies.probe_rules import with_plans

from .sensitivity import Sensitivity, Sides

STEPS = 64
"""Steps per byte in which costs are counted, rounded up: groups of up to 128 tokens share bytes."""
ROUNDS = 8
"""Most attempts to fit what does not depend on single sides: tables of the methods, cos and sin."""


@dataclass(frozen=True)
class Budget:
    """What a cache may take, everything counted: bits per packed number, or bytes of the whole cache.

    bits: scalars, cos and sin counted.
    memory: bytes of a cache of `batch` sequences of `tokens` tokens; dense tokens and tables of the methods count too.
    """

    shape: ModelShape
    bits: float | None = None
    memory: float | None = None
    tokens: int = 0
    batch: int = 1

    def spare(self, config: CompressionConfig) -> float:
        """Bytes per packed token and key/value head, of all layers together, that a config leaves; below 0 too many.

        Raises:
            ValueError: the memory does not hold the tokens that stay dense, or nothing would be packed.
        """
        layers, _, heads, dim = self.shape
        if self.bits is not None:
            return (self.bits - packed_bits(config, dim, layers, heads)) * 2 * dim * layers / 8
        assert self.memory is not None
        dense = min(self.tokens, config.sink_tokens + config.recent_tokens)
        taken = total_bytes(config, layers, heads, dim, self.tokens, self.batch)
        packed = sum(side_bytes(plan, dim) for plan in config.plan(["full_attention"] * layers))
        fixed = taken - self.batch * heads * (self.tokens - dense) * packed
        if self.memory <= fixed or self.tokens <= dense:
            raise ValueError(
                f"memory={self.memory:g} bytes for {self.batch} x {self.tokens} tokens: {fixed:g} are taken by what "
                f"does not depend on the bits, of them {dense} tokens per sequence that stay dense"
            )
        return (self.memory - taken) / (self.batch * heads * (self.tokens - dense))


@dataclass(frozen=True)
class Tuned:
    """A config with methods and bits by layer and side, beside the best one with the same in all layers.

    expected, expected_uniform: estimates of their KL, nats per token.
    """

    config: CompressionConfig
    uniform: CompressionConfig
    expected: float
    expected_uniform: float


def tune(found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget) -> Tuned:
    """Choose the numbers of dense tokens, and method and bits of each side of each layer, for the least expected KL.

    Raises:
        ValueError: the budget is less than the cheapest choices take.
    """
    fitting: list[Tuned] = []
    refusal = ValueError("no budget")
    for (sinks, recent), factor in found.ends.items():
        own = base.changed(sink_tokens=sinks, recent_tokens=recent, layers=[])
        try:
            config, loss = _best(found, own, choices, budget)
            uniform, uniform_loss = _best_uniform(found, own, choices, budget)
        except ValueError as error:
            refusal = error
            continue
        fitting.append(Tuned(config, uniform, factor * loss, factor * uniform_loss))
    if not fitting:
        raise refusal
    # The uniform config may have other numbers of dense tokens, if those suit it better.
    even = min(fitting, key=lambda each: each.expected_uniform)
    best = min(fitting, key=lambda each: each.expected)
    return replace(best, uniform=even.uniform, expected_uniform=even.expected_uniform)


def _best(
    found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget
) -> tuple[CompressionConfig, float]:
    """The config with the least sum of losses, and that sum."""
    dim = budget.shape.head_dim
    units = [(layer, side) for layer in found.plans for side in SIDES]
    options = {side: [(m, c) for m, of in enumerate(choices[side]) for c in range(len(of))] for side in SIDES}
    costs = {side: [_cost(choices[side][m][c], side, dim) for m, c in options[side]] for side in SIDES}
    losses = [[found.loss(layer, side, m, c) for m, c in options[side]] for layer, side in units]
    steps = [[math.ceil(cost * STEPS - 1e-9) for cost in costs[side]] for _, side in units]
    plans = {
        layer: replace(plan, sink_tokens=base.sink_tokens, recent_tokens=base.recent_tokens)
        for layer, plan in found.plans.items()
    }
    allowed = len(plans) * side_bytes(plans[units[0][0]], dim) + budget.spare(base)
    for _ in range(ROUNDS):
        try:
            chosen = allocate(steps, losses, math.floor(allowed * STEPS + 1e-9))
        except ValueError:
            least = sum(min(costs[side]) for _, side in units)
            raise ValueError(
                f"budget: the fewest bits take {8 * (least - allowed) / (2 * dim * len(plans)):.2f} bits per number "
                "more; allowed are a larger budget, or fewer bits (--level)"
            ) from None
        for (layer, side), number in zip(units, chosen, strict=True):
            method, choice = options[side][number]
            plans[layer] = replace(plans[layer], **{side: choices[side][method][choice]})
        config = with_plans(base, plans)
        if (spare := budget.spare(config)) >= -1e-6:
            return config, sum(of_unit[number] for of_unit, number in zip(losses, chosen, strict=True))
        # Methods with tables, or cos and sin, of their own have joined.
        allowed = sum(of_unit[number] for of_unit, number in zip(steps, chosen, strict=True)) / STEPS + spare
    raise ValueError(
        "budget: no mixture of these methods was found that keeps to it; allowed are fewer of them (--also)"
    )


def _best_uniform(
    found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget
) -> tuple[CompressionConfig, float]:
    """The config with the least loss of those with the same choices in all layers, and that loss."""
    options = {
        side: [
            (sum(found.loss(layer, side, m, c) for layer in found.plans), choice)
            for m, of_method in enumerate(choices[side])
            for c, choice in enumerate(of_method)
        ]
        for side in SIDES
    }
    pairs = sorted(
        ((k_loss + v_loss, keys, values) for k_loss, keys in options["keys"] for v_loss, values in options["values"]),
        key=lambda pair: pair[0],
    )
    for loss, keys, values in pairs:
        config = base.model_copy(update={"keys": keys, "values": values, "layers": []})
        if budget.spare(config) >= -1e-6:
            return config, loss
    raise ValueError("budget: no config with the same bits in all layers keeps to it; allowed is a larger budget")


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
