"""Measurements of the probe: each side of each layer, compressed alone. The command is in `probe.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig
from kvcache_compress.eval.caches.caches import Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.prefill import CacheRun, prefill
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.eval.tasks.scoring import compare_logits, compare_tokens
from kvcache_compress.storage.side import SideState

from .probe_rules import DENSE, compress_only, leave_dense, plans_of, rules_yaml
from .recording import attention_modules, record_outputs, rms_error


@dataclass(frozen=True)
class Harm:
    """Change of the model's output that a cache causes, means over windows.

    Attributes:
        kl: KL(full || this) in nats per token; `kl_stderr` its standard error over windows, None for a single one.
        top1: share of positions at which the most likely token is that of the full cache.
        packed_tokens: tokens per sequence stored compressed after the prefix.
        all_bits: bits per number over the whole cache, everything counted.
    """

    kl: float
    kl_stderr: float | None
    top1: float
    packed_tokens: float
    all_bits: float


@dataclass(frozen=True)
class ProbeRow(Harm):
    """One side of one layer, compressed alone by `method`.

    Attributes:
        stored_bits: per packed number.
        relative_mse: squared error of the packed vectors over their squared length; None if the model's own vectors are
            unavailable, as in models with layers other than full attention.
        attention_error: RMS error of the layer's attention output over its RMS; None if the layer has no single
            attention module.
    """

    layer: int
    side: Side
    method: str
    stored_bits: float
    relative_mse: float | None
    attention_error: float | None


@dataclass(frozen=True)
class Probe:
    """Result of a probe.

    Attributes:
        rows: sides of layers, the most harmful first.
        skipped: reasons why layers or sides were not probed, by name.
        whole: the config as it is.
        rules: YAML of `layers:` that leaves the worst sides uncompressed; `ruled` is the config with them.
    """

    rows: list[ProbeRow]
    skipped: dict[str, str]
    whole: Harm
    rules: str
    ruled: Harm


def probe_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: CompressionConfig,
    windows: Perplexity,
    *,
    worst: int = 4,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Probe:
    """Compress each side of each layer alone, and measure the loss.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        config: to probe.
        windows: of texts.
        worst: sides that the suggested rules leave uncompressed.
        on_progress: called with runs done, runs in all, and the next one's label.

    Raises:
        ValueError: a config that does not fit the model or compresses nothing, or a prefix too short for it.
    """
    plans, skipped = plans_of(model, config)
    sides = [(layer, side) for layer, plan in plans.items() for side in SIDES if plan.side(side) != DENSE]
    if not sides:
        raise ValueError("the config compresses no full-attention layer, so there is nothing to probe")
    if not 1 <= worst <= len(sides):
        raise ValueError(f"worst={worst}: allowed 1 to {len(sides)}, the sides that this config compresses")
    samples = windows.samples(model, tokenizer)
    done, total = 0, len(samples) * (len(sides) + 2)

    def tell(label: str, run: bool = True) -> None:
        nonlocal done
        if on_progress is not None:
            on_progress(done, total, label)
        done += run

    whole, ruled = [], []
    alone: dict[tuple[int, Side], list[dict[str, Any]]] = {one: [] for one in sides}
    for sample in samples:
        tell("prefill", run=False)
        window = Window(model, sample, windows.step)
        tell("all sides")
        whole.append(window.harm(config))
        for layer, side in sides:
            tell(f"layer {layer}, {side}")
            alone[layer, side].append(window.one_side(compress_only(config, plans[layer], layer, side), layer, side))
    rows = [
        ProbeRow(layer=layer, side=side, method=plans[layer].side(side).method, **_means(records))
        for (layer, side), records in alone.items()
    ]
    rows.sort(key=lambda row: -row.kl)
    suggestion = leave_dense(config, plans, [(row.layer, row.side) for row in rows[:worst]])
    for sample in samples:  # prefilled again: keeping the prefills of all windows could take too much memory
        tell("suggested rules")
        ruled.append(Window(model, sample, windows.step).harm(suggestion))
    tell("probe")
    return Probe(rows, skipped, Harm(**_means(whole)), rules_yaml(suggestion), Harm(**_means(ruled)))


class Window:
    """A prefix, prefilled once, and its continuation with the full cache."""

    def __init__(self, model: PreTrainedModel, sample: Sample, step: int) -> None:
        self.prefill = prefill(model, sample.prompt, sample.question)
        self.tokens, self.step = torch.tensor(sample.data["continuation"]), step
        self.attentions = attention_modules(model)
        full = self.prefill.run(full_cache())
        with record_outputs(self.attentions) as self.outputs:
            self.reference = full.forced(self.tokens, step)

    def harm(self, config: CompressionConfig) -> dict[str, Any]:
        """KL, share of equal most likely tokens, and sizes of a cache of this config."""
        return self._forced(self._fill(config))

    def certify(self, config: CompressionConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Measured]:
        """`compare_tokens` of a cache of this config, and its size."""
        run = self._fill(config)
        return *compare_tokens(self.reference, run.forced(self.tokens, self.step), self.tokens), run.measured

    def one_side(self, config: CompressionConfig, layer: int, side: Side) -> dict[str, Any]:
        """`harm` of a config that compresses this side of this layer alone, and the side's own errors."""
        run = self._fill(config)
        state: SideState = run.cache.layers[layer].sides[side]
        if not state.store.tokens:
            raise ValueError(
                f"layer {layer}, {side}: nothing is compressed after a prefix of {self.prefill.ids.shape[1]} tokens, "
                "so there is nothing to measure; take a longer prefix, or fewer sinks and recent tokens"
            )
        known = {"stored_bits": state.codec.bits_per_number(), "relative_mse": self._relative_mse(state, layer, side)}
        modules = {index: module for index, module in self.attentions.items() if index == layer}
        with record_outputs(modules) as outputs:
            harm = self._forced(run)
        return harm | known | {"attention_error": rms_error(outputs.get(layer), self.outputs.get(layer))}

    def _fill(self, config: CompressionConfig) -> CacheRun:
        return self.prefill.run(preset_cache(config.model_dump(), name="probed"))

    def _forced(self, run: CacheRun) -> dict[str, Any]:
        _, kl, top1 = compare_logits(self.reference, run.forced(self.tokens, self.step), self.tokens)
        measured = run.measured
        return {"kl": kl, "top1": top1, "packed_tokens": measured.packed_tokens, "all_bits": measured.all_bits}

    def _relative_mse(self, state: SideState, layer: int, side: Side) -> float | None:
        if self.prefill.states is None:
            return None
        first, packed = state.sinks.shape[2], state.store.tokens
        original = self.prefill.states[layer][SIDES.index(side)][:, :, first : first + packed].double()
        error = state.decode(0, packed).double() - original
        return (error.square().sum() / original.square().sum()).item()


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over windows, and the standard error of `kl`."""
    means = {
        name: None if value is None else statistics.fmean(record[name] for record in records)
        for name, value in records[0].items()
    }
    kl = [record["kl"] for record in records]
    return means | {"kl_stderr": statistics.stdev(kl) / math.sqrt(len(kl)) if len(kl) > 1 else None}
