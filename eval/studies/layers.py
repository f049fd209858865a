"""Probe of layers: the loss when one side (keys or values) of one layer is compressed alone.

The windows of a text are read as for perplexity: a prefix is prefilled once, each cache is filled from it, and the
continuation is fed in passes of a few tokens. Reported for each full-attention layer and side: the KL divergence of the
next-token distribution from the full cache's, the error of the packed vectors, and the error of that layer's attention
output, whose input is the full cache's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig
from kvcache_compress.eval.caches.caches import Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.prefill import CacheRun, prefill
from kvcache_compress.eval.provenance.artifacts import save_figure
from kvcache_compress.eval.reporting.drawing import COLORS, new_figure
from kvcache_compress.eval.reporting.tables import MAX_KL
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.perplexity import Perplexity
from kvcache_compress.eval.tasks.scoring import compare_logits, compare_tokens
from kvcache_compress.storage.side import SideState

from .rules import DENSE, compress_only, leave_dense, plans_of, rules_yaml


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

    @property
    def advice(self) -> str:
        """The rules, if the cache that they leave is a good one."""
        if self.ruled.kl <= MAX_KL:
            return self.rules
        return f"no rules help enough: the KL is above {MAX_KL:g} with these too; raise --worst, or take more bits"


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


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Attention modules by layer index, of layers with exactly one."""
    modules: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            modules.setdefault(index, []).append(module)
    return {index: of_layer[0] for index, of_layer in modules.items() if len(of_layer) == 1}


@contextmanager
def record_outputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Record the outputs of modules while the context is open, a tensor per pass."""
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(index: int) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: seen.setdefault(index, []).append(
            output[0] if isinstance(output, tuple) else output
        )

    hooks = [module.register_forward_hook(keep(index)) for index, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rms_error(actual: Sequence[torch.Tensor] | None, expected: Sequence[torch.Tensor] | None) -> float | None:
    """RMS error over the RMS of `expected`, over all passes `[B, S, D]`; None if that is missing or zero."""
    if not actual or not expected:
        return None
    right = torch.cat(list(expected), 1).double()
    error = (torch.cat(list(actual), 1).double() - right).norm()
    return (error / right.norm()).item() if right.any() else None


def plot_probe(probe: Probe, title: str, path: Path) -> None:
    """Plot bars per layer, keys beside values: KL, and the error of the layer's attention output."""
    figure = new_figure(9, 6)
    panels = figure.subplots(2, 1, sharex=True)
    for side, color, shift in zip(SIDES, COLORS, (-0.21, 0.21), strict=False):
        rows = [row for row in probe.rows if row.side == side]
        places = [row.layer + shift for row in rows]
        panels[0].bar(places, [row.kl for row in rows], 0.4, yerr=[row.kl_stderr or 0 for row in rows], color=color)
        panels[1].bar(places, [row.attention_error or 0 for row in rows], 0.4, label=side, color=color)
    panels[0].set(ylabel="KL from the full cache, nats", title=title)
    panels[1].set(ylabel="relative error of the attention output", xlabel="layer, one side compressed alone")
    panels[1].legend()
    save_figure(figure, path)
