"""Distribute a budget over the sides of layers."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvcache_compress.cache.estimate import ModelShape, packed_bits, total_bytes, windows_of
from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig, LayerRule, SideConfig
from kvcache_compress.storage.packed_store import SLACK

from .sensitivity import Choices, Sensitivity

STEPS = 64
"""Costs are counted in steps of 1/64 byte per token, rounded up: groups of up to 128 tokens share bytes."""
RIVALS = 3
"""Configs with the same choices in all layers that are measured beside the tuned one."""
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

    def packed_tokens(self, config: CompressionConfig) -> int:
        """Packed tokens per sequence after a prompt, under the config's defaults for all layers."""
        [plan] = config.changed(layers=[]).plan(["full_attention"])
        return windows_of(plan, self.shape.head_dim).leaving(self.tokens - config.sink_tokens)

    def spare(self, config: CompressionConfig) -> float:
        """Bytes per packed token and key/value head, over all layers, that a config leaves; negative if too large.

        The config's rules must number the full-attention layers alone, from 0.
        """
        layers, _, heads, dim = self.shape
        if self.bits is not None:
            return (self.bits - packed_bits(config, dim, layers, heads)) * 2 * dim * layers / 8
        assert self.memory is not None
        packed = max(1, self.packed_tokens(config)) * (1 + SLACK)
        taken = total_bytes(config, layers, heads, dim, self.tokens, self.batch)
        return (self.memory - taken) / (self.batch * heads * packed)


class Tuned(NamedTuple):
    """The best config by layer and side, and the best configs with equal layers."""

    config: CompressionConfig
    rivals: list[CompressionConfig]


def tune(found: Sensitivity, base: CompressionConfig, choices: Choices, budget: Budget) -> Tuned:
    """Choose the bits of each side of each layer for the least expected KL.

    Raises:
        ValueError: No config of these choices fits the budget.
    """
    dense = base.sink_tokens + base.recent_tokens
    if budget.tokens and not budget.packed_tokens(base):
        raise ValueError(f"context={budget.tokens}: {dense} tokens stay dense, so nothing would be packed; raise it")
    dim = budget.shape.head_dim
    costs = {
        side: [bytes_per_token(choice.codec().layout(choice.options(), side, dim)) for choice in choices[side]]
        for side in SIDES
    }
    fewest: dict[str, SideConfig] = {side: choices[side][costs[side].index(min(costs[side]))] for side in SIDES}
    spare = budget.spare(base.model_copy(update=fewest))
    rivals = _rivals(found, base, choices, budget)
    best = _best(found, base, choices, costs, budget, spare)
    if best is None or not rivals:
        missing = -8 * spare / (2 * dim * budget.shape.layers)
        raise ValueError(
            f"budget: even the fewest bits exceed it by {missing:.2f} bits per number ({dense} tokens of each "
            "sequence stay dense); raise the budget, or allow fewer bits with --level"
        )
    return Tuned(best, rivals)


def _best(
    found: Sensitivity, base: CompressionConfig, choices: Choices, costs: dict[Side, list[float]], budget: Budget,
    spare: float,
) -> CompressionConfig | None:  # fmt: skip
    """The config of least expected KL; None if nothing fits. `spare` is what the fewest bits leave."""
    units = list(found.alone)
    losses = [[found.loss(layer, side, n) for n in range(len(choices[side]))] for layer, side in units]
    steps = [[math.ceil(cost * STEPS - 1e-9) for cost in costs[side]] for _, side in units]
    allowed = sum(min(costs[side]) for _, side in units) + spare
    for _ in range(ROUNDS):
        try:
            numbers = allocate(steps, losses, math.floor(allowed * STEPS + 1e-9))
        except ValueError:
            return None
        chosen: dict[int, dict[Side, SideConfig]] = {}
        for (layer, side), number in zip(units, numbers, strict=True):
            chosen.setdefault(layer, {})[side] = choices[side][number]
        # The estimate numbers full-attention layers alone, wherever the model has them.
        spare = budget.spare(_with_choices(base, dict(enumerate(chosen.values()))))
        if spare >= -1e-6:
            return _with_choices(base, chosen)
        # The allocation chose tables, cos or sin that the allowance did not count.
        allowed = sum(of_unit[number] for of_unit, number in zip(steps, numbers, strict=True)) / STEPS + spare
    return None


def _rivals(found: Sensitivity, base: CompressionConfig, choices: Choices, budget: Budget) -> list[CompressionConfig]:
    """Configs with the same choices in all layers, the best first."""
    fitting = []
    for numbers in itertools.product(*(range(len(choices[side])) for side in SIDES)):
        pair = dict(zip(SIDES, numbers, strict=True))
        config = base.model_copy(update={side: choices[side][number] for side, number in pair.items()})
        if budget.spare(config) >= -1e-6:
            fitting.append((sum(found.loss(layer, side, pair[side]) for layer, side in found.alone), config))
    return [config for _, config in sorted(fitting, key=lambda each: each[0])[:RIVALS]]


def _with_choices(config: CompressionConfig, chosen: Mapping[int, Mapping[Side, SideConfig]]) -> CompressionConfig:
    """The config with a rule for each pair of keys and values that differs from its own; equal layers share a rule."""
    groups: dict[tuple[tuple[Side, SideConfig], ...], list[int]] = {}
    for layer, sides in sorted(chosen.items()):
        changed = tuple((side, choice) for side, choice in sides.items() if choice != getattr(config, side))
        if changed:
            groups.setdefault(changed, []).append(layer)
    rules = [LayerRule.model_validate({"match": layers, **dict(changed)}) for changed, layers in groups.items()]
    return config.model_copy(update={"layers": rules})
