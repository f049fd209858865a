"""Share a budget out among the sides of layers, and certify the config that comes of it on other text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kvcache_compress.cache.estimate import ModelShape, packed_bits, total_bytes
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, LayerPlan, SideConfig
from kvcache_compress.eval.studies.layers import Window
from kvcache_compress.eval.studies.rules import Plans, with_plans

from .sensitivity import Progress, Sensitivity, Sides

STEPS = 64
"""Steps per byte in which costs are counted, rounded up: groups of up to 128 tokens share bytes."""
ROUNDS = 8
"""Most attempts to fit what does not depend on single sides: tables of the methods, cos and sin."""


@dataclass(frozen=True)
class Budget:
    """Upper limit of a cache's size, with everything counted: bits per packed number, or bytes of the whole cache.

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

        The config's rules count the full-attention layers alone, from 0 on.
        """
        layers, _, heads, dim = self.shape
        if self.bits is not None:
            return (self.bits - packed_bits(config, dim, layers, heads)) * 2 * dim * layers / 8
        assert self.memory is not None
        packed = max(1, self.tokens - config.sink_tokens - config.recent_tokens)
        taken = total_bytes(config, layers, heads, dim, self.tokens, self.batch)
        return (self.memory - taken) / (self.batch * heads * packed)


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
        ValueError: no config of these choices keeps to the budget.
    """
    # Methods have tables of their own: one of them everywhere may fit where a mixture does not.
    mixtures = [choices]
    if len(choices["keys"]) + len(choices["values"]) > 2:
        mixtures += [{"keys": [keys], "values": [values]} for keys in choices["keys"] for values in choices["values"]]
    fitting: list[Tuned] = []
    for (sinks, recent), factor in found.ends.items():
        if budget.tokens and budget.tokens <= sinks + recent:
            continue  # nothing would be packed
        own = base.changed(sink_tokens=sinks, recent_tokens=recent, layers=[])
        even = _best_uniform(found, own, choices, budget)
        fits = [fit for mixture in mixtures if (fit := _best(found, own, choices, mixture, budget)) is not None]
        if even is not None and fits:
            config, loss = min(fits, key=lambda fit: fit[1])
            fitting.append(Tuned(config, even[0], factor * loss, factor * even[1]))
    if not fitting:
        raise ValueError(_refusal(found, base, choices, budget))
    # The uniform config may have other numbers of dense tokens, if those suit it better.
    uniform = min(fitting, key=lambda each: each.expected_uniform)
    best = min(fitting, key=lambda each: each.expected)
    return replace(best, uniform=uniform.uniform, expected_uniform=uniform.expected_uniform)


def _refusal(found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget) -> str:
    """Message that refuses a budget, with what the cheapest config takes beyond it."""
    sinks, recent = min(found.ends, key=sum)
    if budget.tokens and budget.tokens <= sinks + recent:
        return f"context={budget.tokens} tokens: {sinks + recent} stay dense, so nothing would be packed"
    dim = budget.shape.head_dim
    cheapest = _cheapest(base.changed(sink_tokens=sinks, recent_tokens=recent), choices, dim)
    missing = -8 * budget.spare(cheapest) / (2 * dim * budget.shape.layers)
    return (
        f"budget: even the fewest bits take {missing:.2f} per number more ({sinks + recent} tokens of each sequence "
        "stay dense); allowed are a larger budget, or fewer bits (--level)"
    )


def _best(
    found: Sensitivity, base: CompressionConfig, choices: Sides, mixture: Sides, budget: Budget
) -> tuple[CompressionConfig, float] | None:
    """The config with the least sum of losses, of the methods in `mixture`, and that sum; None if nothing fits."""
    dim = budget.shape.head_dim
    units = [(layer, side) for layer in found.plans for side in SIDES]
    options = {
        side: [(m, c) for m, of in enumerate(choices[side]) if of in mixture[side] for c in range(len(of))]
        for side in SIDES
    }
    costs = {side: [_cost(choices[side][m][c], side, dim) for m, c in options[side]] for side in SIDES}
    losses = [[found.loss(layer, side, m, c) for m, c in options[side]] for layer, side in units]
    steps = [[math.ceil(cost * STEPS - 1e-9) for cost in costs[side]] for _, side in units]
    plans = {layer: LayerPlan(base.keys, base.values, base.sink_tokens, base.recent_tokens) for layer in found.plans}
    cheapest = _cheapest(base, mixture, dim)
    allowed = len(plans) * sum(_cost(x, side, dim) for side, x in _sides(cheapest).items()) + budget.spare(cheapest)
    for _ in range(ROUNDS):
        try:
            chosen = allocate(steps, losses, math.floor(allowed * STEPS + 1e-9))
        except ValueError:
            return None
        for (layer, side), number in zip(units, chosen, strict=True):
            method, choice = options[side][number]
            changed: dict[str, Any] = {side: choices[side][method][choice]}
            plans[layer] = replace(plans[layer], **changed)
        # The estimate counts full-attention layers alone, in whatever places the model has them.
        spare = budget.spare(with_plans(base, dict(enumerate(plans.values()))))
        if spare >= -1e-6:
            loss = sum(of_unit[number] for of_unit, number in zip(losses, chosen, strict=True))
            return _checked(with_plans(base, plans), plans), loss
        # Methods with tables, or cos and sin, of their own have joined.
        allowed = sum(of_unit[number] for of_unit, number in zip(steps, chosen, strict=True)) / STEPS + spare
    return None


def _checked(config: CompressionConfig, plans: Plans) -> CompressionConfig:
    """The config, whose rules must give the layers just these plans.

    Raises:
        ValueError: a rule inherits an option of the base that its choice does not have.
    """
    found = config.plan(["full_attention"] * (max(plans) + 1))
    for layer, plan in plans.items():
        for side in SIDES:
            if found[layer].side(side).options() != plan.side(side).options():
                raise ValueError(
                    f"{plan.side(side).method} with other options than the base's: allowed is a method of --also that "
                    "the base does not have"
                )
    return config


def _best_uniform(
    found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget
) -> tuple[CompressionConfig, float] | None:
    """The config with the least loss of those with the same choices in all layers, and that loss; None if none fits."""
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
    return None


def _cheapest(base: CompressionConfig, choices: Sides, head_dim: int) -> CompressionConfig:
    """The choices with the fewest bytes, in all layers."""
    fewest: dict[str, SideConfig] = {}
    for side in SIDES:
        known = [choice for of_method in choices[side] for choice in of_method]
        costs = [_cost(choice, side, head_dim) for choice in known]
        fewest[side] = known[costs.index(min(costs))]
    return base.model_copy(update={**fewest, "layers": []})


def _sides(config: CompressionConfig) -> dict[Side, SideConfig]:
    return {"keys": config.keys, "values": config.values}


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


def certify(
    windows: Sequence[Callable[[], Window]], configs: Sequence[CompressionConfig], on_progress: Progress
) -> list[Certificate]:
    """Measure caches of some configs on windows, each of which is prefilled once; report the windows done.

    Raises:
        ValueError: a config does not fit the model, or packs nothing.
    """
    found: list[list[_Scores]] = [[] for _ in configs]
    for done, make in enumerate(windows):
        on_progress(done, len(windows), "windows")
        window = make()
        for records, config in zip(found, configs, strict=True):
            nll, kl, same, measured = window.certify(config)
            if not measured.packed_tokens:
                raise ValueError("nothing is packed after this prefix: allowed are a longer one, or fewer dense tokens")
            records.append(_Scores(nll, kl, same, measured.packed_bits))
    on_progress(len(windows), len(windows), "windows")
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
