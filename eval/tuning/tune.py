"""Distribute a budget over the sides of layers, and validate the resulting config on other text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcache_compress.cache.estimate import ModelShape, packed_bits, total_bytes
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, LayerPlan, SideConfig

from .loss import Loss, Scores, Window
from .rules import Plans, with_plans
from .sensitivity import Progress, Sensitivity, Sides

STEPS = 64
"""Costs are counted in steps of 1/64 byte per token, rounded up: groups of up to 128 tokens share bytes."""
ROUNDS = 8
"""Most allocations to try until what single sides do not determine fits too: tables of methods, cos and sin."""


@dataclass(frozen=True)
class Budget:
    """Largest size of a cache, with everything counted: bits per packed number, or bytes of the whole cache.

    Attributes:
        shape: sizes of the model.
        bits: bits per packed number; scales, cos and sin count.
        memory: bytes of a cache of `batch` sequences of `tokens` tokens; dense tokens and tables of methods count too.
        tokens: tokens per sequence, for `memory`.
        batch: sequences, for `memory`.
    """

    shape: ModelShape
    bits: float | None = None
    memory: float | None = None
    tokens: int = 0
    batch: int = 1

    def spare(self, config: CompressionConfig) -> float:
        """Bytes per packed token and key/value head, over all layers, that a config leaves; negative if too large.

        The config's rules must number the full-attention layers alone, from 0.
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
    """The best config by layer and side, and the best one that is the same in all layers.

    Attributes:
        config: the config with rules by layer.
        uniform: the config with the same keys and the same values in all layers.
        expected: estimated KL of `config` in nats per token.
        expected_uniform: estimated KL of `uniform`.
    """

    config: CompressionConfig
    uniform: CompressionConfig
    expected: float
    expected_uniform: float


def tune(found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget) -> Tuned:
    """Choose dense tokens, and method and bits of each side of each layer, for the least expected KL.

    Raises:
        ValueError: No config of these choices fits the budget.
    """
    # Each method has tables of its own, so one method everywhere may fit where a mixture does not.
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
    uniform = min(fitting, key=lambda each: each.expected_uniform)
    best = min(fitting, key=lambda each: each.expected)
    return replace(best, uniform=uniform.uniform, expected_uniform=uniform.expected_uniform)


def _refusal(found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget) -> str:
    """Error message for a budget that nothing fits, with the bits that the cheapest config lacks."""
    sinks, recent = min(found.ends, key=sum)
    if budget.tokens and budget.tokens <= sinks + recent:
        return f"context={budget.tokens}: {sinks + recent} tokens stay dense, so nothing would be packed; raise it"
    dim = budget.shape.head_dim
    cheapest = _cheapest(base.changed(sink_tokens=sinks, recent_tokens=recent), choices, dim)
    missing = -8 * budget.spare(cheapest) / (2 * dim * budget.shape.layers)
    return (
        f"budget: even the fewest bits exceed it by {missing:.2f} bits per number ({sinks + recent} tokens of each "
        "sequence stay dense); raise the budget, or allow fewer bits with --level"
    )


def _best(
    found: Sensitivity, base: CompressionConfig, choices: Sides, mixture: Sides, budget: Budget
) -> tuple[CompressionConfig, float] | None:
    """The config of least expected KL with the methods in `mixture`, and that KL; None if nothing fits."""
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
        # The estimate numbers full-attention layers alone, wherever the model has them.
        spare = budget.spare(with_plans(base, dict(enumerate(plans.values()))))
        if spare >= -1e-6:
            loss = sum(of_unit[number] for of_unit, number in zip(losses, chosen, strict=True))
            return _checked(with_plans(base, plans), plans), loss
        # The allocation chose methods with tables, cos or sin that the allowance did not count.
        allowed = sum(of_unit[number] for of_unit, number in zip(steps, chosen, strict=True)) / STEPS + spare
    return None


def _checked(config: CompressionConfig, plans: Plans) -> CompressionConfig:
    """Check that the config's rules give the layers exactly these plans.

    Raises:
        ValueError: A rule would inherit an option of the base that its choice does not have.
    """
    found = config.plan(["full_attention"] * (max(plans) + 1))
    for layer, plan in plans.items():
        for side in SIDES:
            if found[layer].side(side).options() != plan.side(side).options():
                raise ValueError(
                    f"method {plan.side(side).method} has other options in --base than in --also; a rule for a layer "
                    "would inherit them. Use methods in --also that --base does not have"
                )
    return config


def _best_uniform(
    found: Sensitivity, base: CompressionConfig, choices: Sides, budget: Budget
) -> tuple[CompressionConfig, float] | None:
    """The config of least expected KL with the same choices in all layers, and that KL; None if nothing fits."""
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
    """The config with the fewest bytes in all layers."""
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


def validate(
    windows: Sequence[Callable[[], Window]], configs: Sequence[CompressionConfig], on_progress: Progress
) -> list[Loss]:
    """Measure the loss of caches of some configs on the same windows, each of which is prefilled once.

    Raises:
        ValueError: A config does not fit the model, or packs nothing.
    """
    found: list[list[Scores]] = [[] for _ in configs]
    for done, make in enumerate(windows):
        on_progress(done, len(windows), "windows")
        window = make()
        for scores, config in zip(found, configs, strict=True):
            scores.append(window.score(config))
    on_progress(len(windows), len(windows), "windows")
    return [Loss.of(scores) for scores in found]
