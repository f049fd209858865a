"""Measure how sensitive each side of each layer is: its KL when it alone is compressed, and how that falls with bits.

A cache's KL is close to the sum of its sides' KLs, because errors of different layers are nearly independent and the KL
is quadratic in them. Each side is measured at the base's number of bits; at others it follows the curve of all keys or
all values, which is measured with that side of all layers compressed. Results go to a file at once, and a later run
reuses them.
"""

import hashlib
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_compress import __version__
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, SideConfig
from kvcache_compress.eval.caches.caches import preset_cache
from kvcache_compress.eval.caches.prefill import STEP_TOKENS, Prefill, prefill
from kvcache_compress.eval.provenance.results import fingerprint, write_atomically
from kvcache_compress.eval.runner.progress import Progress
from kvcache_compress.eval.tasks.benchmark import Record, Sample
from kvcache_compress.eval.tasks.perplexity import score_window, window_scores

from .rules import DENSE, compress_only

Choices = dict[Side, list[SideConfig]]
"""Choices for keys and for values, by rising bits."""


@dataclass(frozen=True)
class Sensitivity:
    """KL in nats per token, averaged over windows.

    Attributes:
        alone: by layer and side, at the base's bits, when nothing else is compressed.
        curves: by side and choice, relative to that of the base's bits, when that side of all layers is compressed.
    """

    alone: dict[tuple[int, Side], float]
    curves: dict[Side, list[float]]

    def loss(self, layer: int, side: Side, choice: int) -> float:
        """Estimate the KL of one side of a layer under a choice."""
        return self.alone[layer, side] * self.curves[side][choice]


def score(shared: Prefill, sample: Sample, config: CompressionConfig) -> Record:
    """Score a window's continuation through a cache of this config, with the cache's size.

    Raises:
        ValueError: The config does not fit the model, or packs nothing of the prefix.
    """
    run = shared.run(preset_cache(config, name="scored"))
    if not run.measured.packed_tokens:
        raise ValueError(
            f"prefix: nothing is packed after {shared.ids.shape[1]} tokens, so there is no loss to measure; "
            "use a longer prefix, or fewer sinks and recent tokens"
        )
    return score_window(run, torch.tensor(sample.data["continuation"])) | asdict(run.measured)


def measure_losses(
    model: PreTrainedModel, samples: Sequence[Sample], configs: Sequence[CompressionConfig], on_progress: Progress
) -> list[dict[str, float]]:
    """Measure caches of some configs on the same windows: the scores of `Perplexity`, and `packed_bits`.

    Raises:
        ValueError: A config does not fit the model, or packs nothing.
    """
    found: list[list[Record]] = [[] for _ in configs]
    for done, sample in enumerate(samples):
        on_progress(done, len(samples), "windows")
        shared = prefill(model, sample.prompt)
        for records, config in zip(found, configs, strict=True):
            records.append(score(shared, sample, config))
    on_progress(len(samples), len(samples), "windows")
    return [
        window_scores(records) | {"packed_bits": statistics.fmean(record["packed_bits"] for record in records)}
        for records in found
    ]


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
    layers: Sequence[int],
    samples: Sequence[Sample],
    base: CompressionConfig,
    choices: Choices,
    record: Path,
    on_progress: Progress = lambda done, total, label: None,
) -> Sensitivity:
    """Measure all sides of some layers of a model, the full-attention ones, on samples of `Perplexity`.

    Args:
        base: config without rules, whose dense tokens, keys and values are the starting point.
        choices: choices for keys and for values, the base's own among them.
        record: JSON file of the results so far; a later run goes on from it.

    Raises:
        ValueError: The config does not fit the model, or a prefix is too short for it.
        OSError: The file cannot be written.
    """
    own: dict[Side, SideConfig] = {"keys": base.keys, "values": base.values}
    runs: dict[str, CompressionConfig] = {}
    for side in SIDES:
        other: Side = "values" if side == "keys" else "keys"
        for choice in choices[side]:
            runs[_name(side, choice)] = base.model_copy(update={side: choice, other: DENSE})
    for layer in layers:
        for side in SIDES:
            runs[_name(side, own[side], layer)] = compress_only(base, layer, side, own[side])
    texts = [[sample.prompt.tolist(), sample.data["continuation"]] for sample in samples]
    weights = [str(model.dtype), model.device.type, fingerprint(model)]
    known = _Record(record, [__version__, base.model_dump(mode="json"), texts, STEP_TOKENS, weights])
    done, total = 0, len(samples) * len(runs)
    for index, sample in enumerate(samples):
        missing = [name for name in runs if f"{index}: {name}" not in known.kl]
        done += len(runs) - len(missing)
        shared = prefill(model, sample.prompt) if missing else None
        for name in missing:
            on_progress(done, total, name)
            assert shared is not None
            known.add(f"{index}: {name}", score(shared, sample, runs[name])["kl"])
            done += 1
    on_progress(done, total, "measured")

    def mean(name: str) -> float:
        return statistics.fmean(known.kl[f"{index}: {name}"] for index in range(len(samples)))

    return Sensitivity(
        {(layer, side): mean(_name(side, own[side], layer)) for layer in layers for side in SIDES},
        {
            side: [mean(_name(side, choice)) / max(mean(_name(side, own[side])), 1e-12) for choice in choices[side]]
            for side in SIDES
        },
    )


def _name(side: Side, choice: SideConfig, layer: int | None = None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    options = ", ".join(f"{name}={value}" for name, value in choice.model_dump(mode="json").items() if name != "method")
    return f"{where}, {side}: {choice.method} {options}"


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
