"""Measure how sensitive each side of each layer is: its KL when it alone is compressed, and how that falls with bits.

A cache's KL is close to the sum of its sides' KLs, because errors of different layers are nearly independent and the KL
is quadratic in them. Each side is measured at the base's number of bits; at others it follows the curve of all keys or
all values, which is measured with that side of all layers compressed.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import PrivateAttr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress import __version__
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, LayerRule, SideConfig
from kvcache_compress.eval.caches.caches import preset_cache
from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.eval.provenance.results import digest_of, fingerprint
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell
from kvcache_compress.eval.tasks.benchmark import Record, Sample
from kvcache_compress.eval.tasks.perplexity import Perplexity

DENSE = SideConfig(method="none")
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


class GivenWindows(Perplexity):
    """Scores of `Perplexity` on windows that are given, instead of cut from texts."""

    _given: list[Sample] = PrivateAttr()

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return self._given

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        if not run.measured.packed_tokens:
            raise ValueError(
                f"prefix: nothing is packed after {sample.prompt.shape[1]} tokens, so there is no loss to measure; "
                "use a longer prefix, or fewer sinks and recent tokens"
            )
        return super().score(run, sample, tokenizer)


def score_configs(
    runner: Runner, name: str, windows: Sequence[Sample], configs: Mapping[str, CompressionConfig]
) -> dict[str, Cell]:
    """Score caches of these configs on the same windows.

    Raises:
        ValueError: A config does not fit the model, or packs nothing.
    """
    benchmark = GivenWindows()
    benchmark._given = list(windows)
    cells = runner.run(name, benchmark, [preset_cache(config, name=name) for name, config in configs.items()])
    if errors := [cell.error for cell in cells if cell.error is not None]:
        raise ValueError(errors[0])
    return dict(zip(configs, cells, strict=True))


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
    runner: Runner, layers: Sequence[int], windows: Sequence[Sample], base: CompressionConfig, choices: Choices
) -> Sensitivity:
    """Measure all sides of some layers of a model, the full-attention ones.

    Args:
        runner: runner of the model, from whose table an interrupted measurement goes on.
        base: config without rules, whose dense tokens, keys and values are the starting point.
        choices: choices for keys and for values, the base's own among them.

    Raises:
        ValueError: The config does not fit the model, or a prefix is too short for it.
        OSError: The table cannot be written.
    """
    own: dict[Side, SideConfig] = {"keys": base.keys, "values": base.values}
    configs: dict[str, CompressionConfig] = {}
    for side in SIDES:
        other: Side = "values" if side == "keys" else "keys"
        for choice in choices[side]:
            configs[_name(side, choice)] = base.model_copy(update={side: choice, other: DENSE})
    for layer in layers:
        for side in SIDES:
            rule = LayerRule.model_validate({"match": [layer], side: own[side]})
            alone = {"keys": DENSE, "values": DENSE, "layers": [rule]}
            configs[_name(side, own[side], layer)] = base.model_copy(update=alone)
    model = runner.model
    conditions = {"weights": fingerprint(model), "dtype": str(model.dtype), "base": base.model_dump(mode="json")}
    cells = score_configs(runner, f"sides {digest_of(version=__version__, **conditions)}", windows, configs)
    kl = {name: cell.scores["kl"] for name, cell in cells.items()}
    return Sensitivity(
        {(layer, side): kl[_name(side, own[side], layer)] for layer in layers for side in SIDES},
        {
            side: [kl[_name(side, choice)] / max(kl[_name(side, own[side])], 1e-12) for choice in choices[side]]
            for side in SIDES
        },
    )


def _name(side: Side, choice: SideConfig, layer: int | None = None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    options = ", ".join(f"{name}={value}" for name, value in choice.model_dump(mode="json").items() if name != "method")
    return f"{where}, {side}: {choice.method} {options}"
