"""Measure how sensitive each side of each layer is: its KL when it alone is compressed, and how that falls with bits.

A cache's KL is close to the sum of its sides' KLs, because errors of different layers are nearly independent and the KL
is quadratic in them. Each side is measured at one number of bits; at others it follows the curve of its kind (keys or
values under one method), which is measured with that side of all layers compressed. Each number of sinks and recent
tokens gets a measured KL factor. Results go to a file at once, and a later run reuses them.
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
from kvcache_compress.eval.provenance.identity import fingerprint
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.tasks.benchmark import Sample

from .loss import Window
from .rules import DENSE, Plans, compress_only, plans_of

Progress = Callable[[int, int, str], None]
Sides = dict[Side, list[list[SideConfig]]]
"""Choices for keys and for values: a list for each method, by rising bits."""
Ends = tuple[int, int]
"""Numbers of tokens that stay dense: sinks, and the recent window."""


@dataclass(frozen=True)
class Sensitivity:
    """KL in nats per token, averaged over windows.

    Attributes:
        alone: by layer, side and method, with the method's reference choice, when nothing else is compressed.
        curves: by side, method and choice, when that side of all layers is compressed.
        references: by side and method, the index of the choice that `alone` was measured with.
        ends: factor of the KL by numbers of dense tokens, relative to the base config's own.
        plans: the base config's plans of the full-attention layers.
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
    """The side's config at its own bits and at all others that its method has, by rising bits.

    Raises:
        ValueError: The method has no option `bits`, or it is not set.
    """
    if "bits" not in side.codec().Options.model_fields:
        raise ValueError(f"method={side.method!r} has no option 'bits', so it cannot be tuned; choose another --base")
    own: float | None = side.options().bits  # type: ignore[attr-defined]
    if own is None:
        raise ValueError(f"method={side.method!r} has no bits set, so it cannot be tuned; set its option 'bits'")
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
        samples: windows of text, from the benchmark `Perplexity`.
        base: config whose dense tokens, keys and values are the starting point; its rules are ignored.
        choices: choices for keys and for values.
        references: index of the choice of each method with which layers are measured alone.
        record: JSON file of the results so far; a later run goes on from it.
        on_progress: called with runs done, runs in all, and the next one's label.
        ends: numbers of dense tokens to compare; by default only the base's own.

    Raises:
        ValueError: The config does not fit the model, or a prefix is too short for it.
        OSError: The file cannot be written.
    """
    base = base.model_copy(update={"layers": []})
    plans, _ = plans_of(model, base)
    if not plans:
        raise ValueError(f"{model.config.model_type} has no full-attention layer whose cache could be tuned")
    runs: dict[str, CompressionConfig] = {}
    for side in SIDES:
        other: Side = "values" if side == "keys" else "keys"
        for choice in (choice for of_method in choices[side] for choice in of_method):
            runs[_name(side, choice)] = base.model_copy(update={side: choice, other: DENSE})
    # Layer, side, method and choice of everything that is measured alone.
    alone = [
        (layer, side, method, of_method[references[side][method]])
        for layer in plans
        for side in SIDES
        for method, of_method in enumerate(choices[side])
    ]
    for layer, side, _, choice in alone:
        plan = replace(plans[layer], **{side: choice})  # type: ignore[arg-type]
        runs[_name(side, choice, layer)] = compress_only(base, plan, layer, side)
    own = base.sink_tokens, base.recent_tokens
    for sinks, recent in dict.fromkeys([own, *ends]) if ends else ():
        runs[_name_of((sinks, recent))] = base.changed(sink_tokens=sinks, recent_tokens=recent)
    texts = [[sample.prompt.tolist(), sample.data["continuation"]] for sample in samples]
    weights = [str(model.dtype), model.device.type, fingerprint(model)]
    known = _Record(record, [__version__, base.model_dump(mode="json"), texts, STEP_TOKENS, weights])
    done, total = 0, len(samples) * len(runs)
    for index, sample in enumerate(samples):
        missing = [name for name in runs if f"{index}: {name}" not in known.kl]
        done += len(runs) - len(missing)
        window = Window(model, sample) if missing else None
        for name in missing:
            on_progress(done, total, name)
            assert window is not None
            known.add(f"{index}: {name}", window.score(runs[name]).kl.mean().item())
            done += 1
    on_progress(done, total, "measured")

    def mean(name: str) -> float:
        return statistics.fmean(known.kl[f"{index}: {name}"] for index in range(len(samples)))

    return Sensitivity(
        {(layer, side, method): mean(_name(side, choice, layer)) for layer, side, method, choice in alone},
        {side: [[mean(_name(side, choice)) for choice in of] for of in choices[side]] for side in SIDES},
        references,
        {each: mean(_name_of(each)) / max(mean(_name_of(own)), 1e-12) for each in ends} or {own: 1.0},
        plans,
    )


def _name(side: Side, choice: SideConfig, layer: int | None = None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    options = ", ".join(f"{name}={value}" for name, value in choice.model_dump(mode="json").items() if name != "method")
    return f"{where}, {side}: {choice.method} {options}"


def _name_of(ends: Ends) -> str:
    return f"{ends[0]} sinks and {ends[1]} recent tokens"


class _Record:
    """KL by run, kept in a JSON file; results of other conditions are dropped."""

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
