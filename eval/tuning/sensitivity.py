"""Measure what each side of each layer costs: the KL when it alone is compressed, and how that falls with its bits.

The KL of a cache is close to the sum of those of its sides, as errors of different layers are nearly independent and
the KL is quadratic in them. A side's KL at other bits than the measured ones follows the curve of its kind, keys or
values under one method, measured with that side of all layers compressed. What the dense tokens at both ends are worth
is measured as a factor of the whole KL. A measurement writes its results to a file as it goes, and goes on from it when
it is started again.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from kvcache_compress import __version__
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.eval.caches.prefill import STEP_TOKENS
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.studies.layers import Window
from kvcache_compress.eval.studies.rules import DENSE, Plans, compress_only, plans_of
from kvcache_compress.eval.tasks.benchmark import Sample

Progress = Callable[[int, int, str], None]
Sides = dict[Side, list[list[SideConfig]]]
"""The choices of keys and of values: a list for each method, in rising order of bits."""
Ends = tuple[int, int]
"""Numbers of tokens that stay dense: sinks, and the recent window."""


@dataclass(frozen=True)
class Sensitivity:
    """KL in nats per token, means over windows.

    alone: of each side of each layer, compressed alone by each method of `choices` with its reference choice.
    curves: of keys and of values of all layers, for each choice of each method.
    references: index of the choice with which a method was measured layer by layer.
    ends: of the whole base config with other numbers of dense tokens, as factors of its KL with its own.
    plans: the plans of the full-attention layers.
    """

    alone: dict[tuple[int, Side, int], float]
    curves: dict[Side, list[list[float]]]
    references: dict[Side, list[int]]
    ends: dict[Ends, float]
    plans: Plans

    def loss(self, layer: int, side: Side, method: int, choice: int) -> float:
        """Estimate the KL of one side of a layer under a choice."""
        curve = self.curves[side][method]
        return self.alone[layer, side, method] * curve[choice] / max(curve[self.references[side][method]], 1e-12)


def with_bits(side: SideConfig, bits: Collection[float]) -> list[SideConfig]:
    """The method of a side at its own number of bits and at others, those that it does not have left out.

    Raises:
        ValueError: the method has no option `bits`, or no number is set.
    """
    if "bits" not in side.codec().Options.model_fields:
        raise ValueError(f"method={side.method!r}: its bits cannot be tuned, as it has no option 'bits'")
    own: float | None = side.options().bits  # type: ignore[attr-defined]
    if own is None:
        raise ValueError(f"method={side.method!r}: its bits cannot be tuned, as none are set")
    found = [side]
    for number in set(bits) - {own}:
        with suppress(ValueError):
            found.append(side.merged(SideConfig.of({"method": side.method, "bits": number})))
    return sorted(found, key=lambda choice: choice.options().bits)  # type: ignore[attr-defined]


def measure(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    base: CompressionConfig,
    choices: Sides,
    references: dict[Side, list[int]],
    record: Path,
    on_progress: Progress = lambda done, total, label: None,
    ends: Sequence[Ends] = (),
) -> Sensitivity:
    """Measure all sides of all full-attention layers.

    Args:
        model: a causal language model in evaluation mode.
        samples: windows of text, as of the benchmark `Perplexity`.
        base: sinks and recent window, and the keys and values with which `ends` are measured; its rules are left out.
        choices: the choices of keys and of values.
        references: index of the choice of each method that is measured layer by layer.
        record: JSON file of the results so far, from which an interrupted measurement goes on.
        on_progress: called with runs done, runs in all, and the next one's label.
        ends: numbers of dense tokens to choose from; by default those of `base`.

    Raises:
        ValueError: the config does not fit the model, or a prefix is too short for it.
        OSError: the file cannot be written.
    """
    base = base.model_copy(update={"layers": []})
    plans, _ = plans_of(model, base)
    if not plans:
        raise ValueError(f"{model.config.model_type} has no full-attention layer whose cache could be tuned")
    runs: dict[str, tuple[CompressionConfig, tuple[int, Side] | None]] = {}
    for side in SIDES:
        other: Side = "values" if side == "keys" else "keys"
        for choice in (choice for of_method in choices[side] for choice in of_method):
            runs[_name(side, choice)] = base.model_copy(update={side: choice, other: DENSE}), None
    for layer, side, _, choice in (sides := _by_layer(plans, choices, references)):
        config = compress_only(base, replace(plans[layer], **{side: choice}), layer, side)
        runs[_name(side, choice, layer)] = config, (layer, side)
    own = base.sink_tokens, base.recent_tokens
    for sinks, recent in dict.fromkeys([own, *ends]) if ends else ():
        runs[_name_of((sinks, recent))] = base.changed(sink_tokens=sinks, recent_tokens=recent), None
    texts = [[sample.prompt.tolist(), sample.data["continuation"]] for sample in samples]
    weights = [str(model.dtype), model.device.type, *_weights(model)]
    known = _Record(record, [__version__, base.model_dump(mode="json"), texts, STEP_TOKENS, weights])
    done, total = 0, len(samples) * len(runs)
    for index, sample in enumerate(samples):
        missing = [name for name in runs if f"{index}: {name}" not in known.kl]
        done += len(runs) - len(missing)
        window = Window(model, sample, STEP_TOKENS) if missing else None
        for name in missing:
            on_progress(done, total, name)
            assert window is not None
            config, one = runs[name]
            harm = window.harm(config) if one is None else window.one_side(config, *one)
            known.add(f"{index}: {name}", harm["kl"])
            done += 1
    on_progress(done, total, "measured")

    def mean(name: str) -> float:
        return statistics.fmean(known.kl[f"{index}: {name}"] for index in range(len(samples)))

    return Sensitivity(
        {(layer, side, method): mean(_name(side, choice, layer)) for layer, side, method, choice in sides},
        {side: [[mean(_name(side, choice)) for choice in of] for of in choices[side]] for side in SIDES},
        references,
        {each: mean(_name_of(each)) / max(mean(_name_of(own)), 1e-12) for each in ends} or {own: 1.0},
        plans,
    )


def _by_layer(
    plans: Plans, choices: Sides, references: dict[Side, list[int]]
) -> list[tuple[int, Side, int, SideConfig]]:
    """Layer, side, method and choice of everything that is measured alone."""
    return [
        (layer, side, method, of_method[references[side][method]])
        for layer in plans
        for side in SIDES
        for method, of_method in enumerate(choices[side])
    ]


def _name(side: Side, choice: SideConfig, layer: int | None = None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    options = ", ".join(f"{name}={value}" for name, value in choice.model_dump(mode="json").items() if name != "method")
    return f"{where}, {side}: {choice.method} {options}"


def _name_of(ends: Ends) -> str:
    return f"{ends[0]} sinks and {ends[1]} recent tokens"


def _weights(model: PreTrainedModel) -> list[float]:
    """Sums of the first weights, by which a model is told from others of its name."""
    return [float(x.detach().float().sum()) for _, x in zip(range(8), model.parameters(), strict=False)]


class _Record:
    """KL by run in a JSON file; what was measured under other conditions is dropped."""

    def __init__(self, path: Path, conditions: Any) -> None:
        self.path = path
        self.digest = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
        self.kl: dict[str, float] = {}
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return
        if isinstance(found, Mapping) and found.get("digest") == self.digest:
            self.kl = dict(found.get("kl") or {})

    def add(self, name: str, kl: float) -> None:
        self.kl[name] = kl
        write_atomically(self.path, json.dumps({"digest": self.digest, "kl": self.kl}, indent=1) + "\n")
