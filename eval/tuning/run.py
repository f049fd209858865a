"""Tune a config with bits by layer and side for one model and budget, and validate it on other text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.cache.estimate import ModelShape
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.modeling.facts import head_shape
from kvcache_compress.storage.dynamic import LEAST_TOKENS
from kvcache_compress.validation import parse_size, quoted

from .loss import Loss, Window
from .rules import Plans, plans_of, rules_yaml
from .sensitivity import Ends, Progress, Sensitivity, Sides, measure, with_bits
from .tune import Budget, tune, validate

LEVELS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Bits that a side of a layer may have, if its method has them."""
SINKS, RECENT = (4, 16, 64), (32, 64, 128, 256)
"""Numbers of dense tokens that are tried for a budget in bytes."""
CHECKS, SCORED = 3, 256
"""Windows of each text on which a config is validated, and tokens scored in each."""


@dataclass(frozen=True)
class TuningResult:
    """Losses of configs on held-out text.

    Attributes:
        title: the budget or the preset, and the texts on which the losses were measured.
        losses: losses by config: the tuned one and the best one with equal bits everywhere, or the preset.
        expected: KL of the first two, as estimated from the measurements.
    """

    title: str
    losses: dict[str, Loss]
    expected: tuple[float, float] | None = None


def verify_config(
    model: str, preset: str, texts: Sequence[Path], *, prefix: int = 1024, codebooks: Path | None = None,
    statistics: Path | None = None, dtype: str = "float32", device: str | None = None,
    on_progress: Progress = lambda done, total, label: None,
) -> TuningResult:  # fmt: skip
    """Measure the loss of a preset or a YAML file, as `tune_config` validates its result.

    Raises:
        ValueError: No such preset or model, they do not go together, or a text is missing or too short.
    """
    config = load_config(preset).with_files(codebooks=codebooks, statistics=statistics)
    texts = texts or (DEFAULT_TEXT,)
    loaded, tokenizer = load(model, dtype, device)
    checks = [sample for text in texts for sample in _cut(loaded, tokenizer, text, prefix, CHECKS)]
    (loss,) = validate(_windows(loaded, checks), [config], on_progress)
    return TuningResult(f"{preset}, {_named(texts)}", {preset: loss})


def tune_config(
    model: str, texts: Sequence[Path], output: Path, *, bits: float | None = None, memory: str | None = None,
    context: str | None = None, batch: int = 1, check_texts: Sequence[Path] = (), base: str = "best-2bit",
    also: Sequence[str] = (), sinks: Sequence[int] = (), recent: Sequence[int] = (), levels: Sequence[float] = LEVELS,
    windows: int = 2, prefix: int = 1024, scored: int = 96, codebooks: Path | None = None,
    statistics: Path | None = None, dtype: str = "float32", device: str | None = None,
    on_progress: Progress = lambda done, total, label: None,
) -> TuningResult:  # fmt: skip
    """Tune a config and write it to `output`; an interrupted run goes on from the file `output.measured.json`.

    The arguments are the options of `kvcache-compress tune`, whose help explains them. Give a budget as `bits`, or as
    `memory` with `context`. Without `texts` a text of the package is used.

    Raises:
        ValueError: The options do not go together, nothing fits the budget, or the model cannot be compressed.
        OSError: A file cannot be read or written.
    """
    if (bits is None) == (memory is None):
        raise ValueError("budget: give either --bits, or --memory with --context")
    if memory is not None and context is None:
        raise ValueError(f"memory={quoted(memory)} needs --context too, the tokens of each sequence")
    if bits is not None and (context is not None or batch != 1):
        raise ValueError("--context and --batch have no effect with --bits; drop them, or give --memory")
    if bits is not None and (len(sinks) > 1 or len(recent) > 1):
        raise ValueError("--sinks and --recent can be repeated only with --memory; give each once")
    if bits is not None and not bits > 0:
        raise ValueError(f"bits={bits:g}: must be above 0")
    if scored > SCORED:
        raise ValueError(f"scored={scored}: must be at most {SCORED}")
    presets = [load_config(preset).with_files(codebooks=codebooks, statistics=statistics) for preset in (base, *also)]
    asked = None if memory is None else (parse_size(memory, "memory"), parse_size(context or "", "context"))
    texts = texts or (DEFAULT_TEXT,)
    loaded, tokenizer = load(model, dtype, device)
    measured, checks = _samples(loaded, tokenizer, texts, check_texts, windows, prefix, scored)
    config = presets[0].model_copy(update={"layers": [], "bits_by_layer": None})
    if memory is None or sinks or recent:
        ends = [(s, r) for s in sinks or (config.sink_tokens,) for r in recent or (config.recent_tokens,)]
    else:
        ends = [(s, r) for s in SINKS for r in RECENT]
    config = config.changed(sink_tokens=ends[0][0], recent_tokens=ends[0][1]) if len(ends) == 1 else config
    choices, references = _choices([config, *presets[1:]], levels)
    decoder = loaded.config.get_text_config(decoder=True)
    head_dim, heads, _ = head_shape(decoder)
    plans, _ = plans_of(loaded, config)
    shape = ModelShape(len(plans), decoder.num_attention_heads, heads, head_dim)
    budget = Budget(shape, bits) if asked is None else Budget(shape, None, *asked, batch)
    tune(_unmeasured(plans, choices, references, ends), config, choices, budget)  # fails at once if nothing fits
    record = output.with_name(f"{output.name}.measured.json")
    tried = ends if len(ends) > 1 else ()
    found = measure(loaded, measured, config, choices, references, record, on_progress, tried)
    tuned = tune(found, config, choices, budget)
    configs = {"tuned": tuned.config, "equal bits everywhere": tuned.uniform}
    sides = tuned.uniform.keys.codec(), tuned.uniform.values.codec()
    packed = prefix - tuned.uniform.sink_tokens - tuned.uniform.recent_tokens
    if packed >= LEAST_TOKENS and all(codec.bit_choices for codec in sides):
        configs["the same with bits_by_layer: auto"] = tuned.uniform.model_copy(update={"bits_by_layer": "auto"})
    losses = validate(_windows(loaded, checks), list(configs.values()), on_progress)
    wanted = f"{bits:g} bits" if memory is None else f"{memory} for {batch} x {context} tokens"
    validated_on = _named(check_texts or texts)
    result = TuningResult(
        f"{wanted}, {validated_on}",
        dict(zip(configs, losses, strict=True)),
        (tuned.expected, tuned.expected_uniform),
    )
    name = Path(loaded.name_or_path or type(loaded).__name__).name
    header = [
        f"Tuned by `kvcache-compress tune` for {name}, {wanted}.",
        f"Measured on {_named(texts)}; validated on {validated_on}, with the full cache as reference:",
        *(f"  {name}: {_line(loss)}" for name, loss in result.losses.items()),
    ]
    write_atomically(output, "".join(f"# {line}\n" for line in header) + _yaml(tuned.config))
    return result


def _choices(presets: Sequence[CompressionConfig], levels: Sequence[float]) -> tuple[Sides, dict[Side, list[int]]]:
    """The presets' methods at several bits, each method once, and the index of the preset's own bits in each."""
    choices: Sides = {"keys": [], "values": []}
    references: dict[Side, list[int]] = {"keys": [], "values": []}
    for preset in presets:
        for side in SIDES:
            own = preset.keys if side == "keys" else preset.values
            found = with_bits(own, levels)
            if not any(own in known for known in choices[side]):
                choices[side].append(found)
                references[side].append(found.index(own))
    return choices, references


def _unmeasured(plans: Plans, choices: Sides, references: dict[Side, list[int]], ends: Sequence[Ends]) -> Sensitivity:
    """A sensitivity with equal losses: what fits a budget does not depend on them."""
    return Sensitivity(
        {(layer, side, m): 1.0 for layer in plans for side in SIDES for m in range(len(choices[side]))},
        {side: [[1.0] * len(of) for of in choices[side]] for side in SIDES},
        references,
        dict.fromkeys(ends, 1.0),
        plans,
    )


def _samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Path], check_texts: Sequence[Path],
    windows: int, prefix: int, scored: int,
) -> tuple[list[Sample], list[Sample]]:  # fmt: skip
    """Windows to measure on, and held-out windows to validate on.

    Raises:
        ValueError: A text is too short for both, or is among `check_texts` too.
    """
    for text, check in ((text.resolve(), check.resolve()) for text in texts for check in check_texts):
        if text.is_relative_to(check) or check.is_relative_to(text):
            raise ValueError(f"check_text={quoted(str(check))} is measured on too; give a text that --text does not")
    measured = []
    checks = [sample for path in check_texts for sample in _cut(model, tokenizer, path, prefix, CHECKS)]
    for path in texts:
        found = _cut(model, tokenizer, path, prefix, windows if check_texts else windows + CHECKS)
        measured += found[:windows]
        checks += found[windows:]
        if len(found) <= windows and not check_texts:
            raise ValueError(
                f"text={quoted(str(path))} is too short for {windows} windows of {prefix} + {SCORED} tokens to measure "
                "on and one to validate on; give a longer text, a --check-text, or fewer --windows"
            )
    short = (sample.data | {"continuation": sample.data["continuation"][:scored]} for sample in measured)
    return [replace(sample, data=data) for sample, data in zip(measured, short, strict=True)], checks


def _cut(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, prefix: int, count: int
) -> list[Sample]:
    return Perplexity(texts=(path,), prefix=prefix, scored=SCORED, windows=count).samples(model, tokenizer)


def _windows(model: PreTrainedModel, samples: Sequence[Sample]) -> list[Callable[[], Window]]:
    return [partial(Window, model, sample) for sample in samples]


def _named(paths: Sequence[Path]) -> str:
    return ", ".join("/".join(path.resolve().parts[-2:]) for path in paths)


def _line(loss: Loss) -> str:
    spread = "" if loss.kl_stderr is None else f" ± {loss.kl_stderr:.4f}"
    return (
        f"{loss.packed_bits:.3f} bits per packed number, KL {loss.kl:.4f}{spread} (99.9 %: {loss.kl_999:.3f}), "
        f"same top token {loss.top1:.3f}, perplexity {loss.perplexity:.2f}"
    )


def _yaml(config: CompressionConfig) -> str:
    fields = ("keys", "values", "sink_tokens", "recent_tokens")
    sides = {name: value for name, value in config.model_dump(mode="json").items() if name in fields}
    rules = rules_yaml(config) if config.layers else ""
    return yaml.safe_dump(sides, default_flow_style=None, sort_keys=False) + rules
