"""Probe of layers: the loss when one side (keys or values) of one layer is compressed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.codecs.layout import bytes_per_token
from kvcache_compress.config import CompressionConfig
from kvcache_compress.eval.reporting.tables import MAX_KL
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.modeling.facts import head_shape

from .loss import Loss, Scores, Window
from .rules import DENSE, compress_only, leave_dense, plans_of, rules_yaml


@dataclass(frozen=True)
class ProbeRow:
    """One side of one layer: its method and bits per number, and the loss when it alone is compressed."""

    layer: int
    side: Side
    method: str
    bits: float
    loss: Loss


@dataclass(frozen=True)
class Probe:
    """Result of a probe.

    Attributes:
        rows: a row for each side of each layer, the largest loss first.
        skipped: why layers or sides were not probed, by name.
        whole: loss of the config as it is.
        rules: YAML of `layers:` that leaves the worst sides dense.
        ruled: loss of the config with these rules.
    """

    rows: list[ProbeRow]
    skipped: dict[str, str]
    whole: Loss
    rules: str
    ruled: Loss

    @property
    def advice(self) -> str:
        """The rules if they make a good cache of the config, else what to try instead."""
        if self.ruled.kl <= MAX_KL:
            return self.rules
        return f"these rules do not help enough: the KL stays above {MAX_KL:g}. Raise --worst, or use more bits"


def probe_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: CompressionConfig,
    windows: Perplexity,
    *,
    worst: int = 4,
    on_progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Probe:
    """Compress each side of each full-attention layer alone, and measure the loss.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        config: the config to probe.
        windows: windows of texts on which the loss is measured.
        worst: how many sides the suggested rules leave dense.
        on_progress: called with runs done, runs in all, and the next one's label.

    Raises:
        ValueError: The config does not fit the model or compresses nothing, or the prefix is too short for it.
    """
    plans, skipped = plans_of(model, config)
    sides = [(layer, side) for layer, plan in plans.items() for side in SIDES if plan.side(side) != DENSE]
    if not sides:
        raise ValueError("the config compresses no full-attention layer, so there is nothing to probe")
    if not 1 <= worst <= len(sides):
        raise ValueError(f"worst={worst}: must be between 1 and {len(sides)}, the sides that the config compresses")
    samples = windows.samples(model, tokenizer)
    alone: dict[tuple[int, Side], list[Scores]] = {one: [] for one in sides}
    whole, ruled = [], []
    total = len(samples) * (len(sides) + 2)
    for number, sample in enumerate(samples):
        done = number * (len(sides) + 1)
        on_progress(done, total, "all sides")
        window = Window(model, sample, windows.step)
        whole.append(window.score(config))
        for one, (layer, side) in enumerate(sides, 1):
            on_progress(done + one, total, f"layer {layer}, {side}")
            alone[layer, side].append(window.score(compress_only(config, plans[layer], layer, side)))
    head_dim = head_shape(model.config.get_text_config(decoder=True))[0]
    rows = []
    for (layer, side), scores in alone.items():
        bits = 8 * bytes_per_token(plans[layer].layout(side, head_dim)) / head_dim
        rows.append(ProbeRow(layer, side, plans[layer].side(side).method, bits, Loss.of(scores)))
    rows.sort(key=lambda row: -row.loss.kl)
    suggestion = leave_dense(config, plans, [(row.layer, row.side) for row in rows[:worst]])
    for number, sample in enumerate(samples):  # prefilled again: the prefills of all windows may not fit into memory
        on_progress(total - len(samples) + number, total, "suggested rules")
        ruled.append(Window(model, sample, windows.step).score(suggestion))
    on_progress(total, total, "probe")
    return Probe(rows, skipped, Loss.of(whole), rules_yaml(suggestion), Loss.of(ruled))
