"""`kvcache-compress tune`: a YAML config with bits by layer and side for one model and budget, certified on other text.

kvcache-compress tune --model smollm2-135m --bits 2.25 --text TEXT.txt --output my.yaml
kvcache-compress tune --memory 2GB --context 128K --batch 4 --text TEXT.txt --output my.yaml
kvcache-compress tune --verify turboquant-3bit --text TEXT.txt
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.cache.estimate import ModelShape
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.config import CompressionConfig, load_config
from kvcache_compress.eval.caches.prefill import STEP_TOKENS
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.studies.layers import Window
from kvcache_compress.eval.studies.rules import Plans, plans_of, rules_yaml
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.files.atomic import whole_file
from kvcache_compress.modeling.facts import head_shape
from kvcache_compress.validation import parse_size, quoted

from .sensitivity import Ends, Sensitivity, Sides, measure, with_bits
from .tune import Budget, Certificate, certify, tune

LEVELS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Bits that a side of a layer may have, where its method does."""
SINKS, RECENT = (4, 16, 64), (32, 64, 128, 256)
"""Numbers of tokens that may stay dense at both ends, where a budget in bytes counts them."""
CHECKS, SCORED = 3, 256
"""Windows of each text on which the result is certified, and tokens that are scored in each."""


def run_tuning(
    console: Console,
    model: str,
    texts: Sequence[Path],
    output: Path | None,
    *,
    bits: float | None = None,
    memory: str | None = None,
    context: str | None = None,
    batch: int = 1,
    check_texts: Sequence[Path] = (),
    base: str = "best-2bit",
    also: Sequence[str] = (),
    sinks: Sequence[int] = (),
    recent: Sequence[int] = (),
    levels: Sequence[float] = LEVELS,
    windows: int = 2,
    prefix: int = 1024,
    scored: int = 96,
    verify: str | None = None,
    codebooks: Path | None = None,
    statistics: Path | None = None,
    dtype: str = "float32",
    device: str | None = None,
) -> None:
    """Tune a config and write it, or certify a preset (`verify`); see the command's options.

    codebooks, statistics: files for presets of methods that were calibrated.

    Raises:
        ValueError: options that do not go together, a budget that nothing fits, or a model that cannot be compressed.
        OSError: a file cannot be read or written.
    """
    if verify is not None:
        if bits is not None or memory is not None or output is not None:
            raise ValueError("verify: a preset is certified as it is, without --bits, --memory and --output")
    elif output is None or (bits is None) == (memory is None):
        raise ValueError("a budget is needed, either --bits or --memory with --context, and --output for the config")
    elif memory is not None and context is None:
        raise ValueError("memory: --context is needed too, the tokens of each sequence")
    elif bits is not None and (context is not None or batch != 1):
        raise ValueError("--context, --batch: allowed with --memory; bits per packed number do not depend on them")
    elif bits is not None and (len(sinks) > 1 or len(recent) > 1):
        raise ValueError("--sinks, --recent: several are allowed with --memory; bits per packed number leave them out")

    def config_of(preset: str) -> CompressionConfig:
        return load_config(preset).with_files(codebooks=codebooks, statistics=statistics)

    if bits is not None and bits <= 0:
        raise ValueError(f"--bits {bits:g}: use a number above 0")
    chosen = [config_of(preset) for preset in ([verify] if verify is not None else [base, *also])]
    asked = None if memory is None else (parse_size(memory, "memory"), parse_size(context or "", "context"))
    texts = texts or (DEFAULT_TEXT,)
    loaded, tokenizer = load(model, dtype, device)
    certified_on = ", ".join(map(_named, check_texts or texts))
    if verify is not None:
        checks = [sample for text in check_texts or texts for sample in _cut(loaded, tokenizer, text, prefix, CHECKS)]
        (certificate,) = certify(_windows(loaded, checks), chosen, ProgressLine())
        console.print(_table(f"{verify}, {certified_on}", {verify: certificate}))
        return
    measured, checks = _samples(loaded, tokenizer, texts, check_texts, windows, prefix, scored)
    assert output is not None
    started = time.perf_counter()
    config = chosen[0].model_copy(update={"layers": []})
    if memory is None or sinks or recent:
        ends = [(s, r) for s in sinks or (config.sink_tokens,) for r in recent or (config.recent_tokens,)]
    else:
        ends = [(s, r) for s in SINKS for r in RECENT]
    config = config.changed(sink_tokens=ends[0][0], recent_tokens=ends[0][1]) if len(ends) == 1 else config
    presets = [config, *chosen[1:]]
    choices, references = _choices(presets, levels)
    head_dim, heads, _ = head_shape(loaded.config.get_text_config(decoder=True))
    wanted = f"{bits:g} bits" if memory is None else f"{memory} for {batch} x {context} tokens"
    plans, _ = plans_of(loaded, config)
    shape = ModelShape(len(plans), loaded.config.get_text_config(decoder=True).num_attention_heads, heads, head_dim)
    budget = Budget(shape, bits) if asked is None else Budget(shape, None, *asked, batch)
    tune(_unmeasured(plans, choices, references, ends), config, choices, budget)  # says at once if nothing fits
    record = output.with_name(f"{output.name}.measured.json")
    tried = ends if len(ends) > 1 else ()
    found = measure(loaded, measured, config, choices, references, record, ProgressLine(), tried)
    tuned = tune(found, config, choices, budget)
    console.print("certifying on text that took no part")
    caches = {"tuned": tuned.config, "equal bits everywhere": tuned.uniform}
    results = dict(zip(caches, certify(_windows(loaded, checks), list(caches.values()), ProgressLine()), strict=True))
    minutes = (time.perf_counter() - started) / 60
    header = _header(loaded, wanted, ", ".join(map(_named, texts)), certified_on, results)
    with whole_file(output) as unfinished:
        unfinished.write_text(header + _yaml(tuned.config), encoding="utf-8")
    console.print(_table(f"{wanted}, {certified_on}", results))
    expected = f"{tuned.expected:.4f}, and {tuned.expected_uniform:.4f} with equal bits everywhere"
    console.print(f"{output}: {minutes:.1f} minutes; the measurements let expect a KL of {expected}")


def _choices(presets: Sequence[CompressionConfig], levels: Sequence[float]) -> tuple[Sides, dict[Side, list[int]]]:
    """The methods of presets at several bits, each once, and the index of the preset's own bits in each."""
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
    """A sensitivity without measurements: what fits a budget does not depend on them."""
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
    """Windows of each text to measure on, and windows to certify on that do not overlap with them.

    Raises:
        ValueError: a text is too short for both, or is among `check_texts` too.
    """
    if scored > SCORED:
        raise ValueError(f"scored={scored}: allowed up to {SCORED}")
    for text in texts:
        if any(_holds(text, check) or _holds(check, text) for check in check_texts):
            raise ValueError(f"check_text={quoted(str(text))}: allowed are texts that are not measured on")
    measured = []
    checks = [sample for path in check_texts for sample in _cut(model, tokenizer, path, prefix, CHECKS)]
    for path in texts:
        found = _cut(model, tokenizer, path, prefix, windows if check_texts else windows + CHECKS)
        measured += found[:windows]
        checks += found[windows:]
        if len(found) <= windows and not check_texts:
            raise ValueError(
                f"text={quoted(str(path))}: too short for {windows} windows of {prefix} + {SCORED} tokens to measure "
                "on and one to certify on; allowed are a longer text, a --check-text, or fewer --windows"
            )
    short = [
        replace(sample, data=sample.data | {"continuation": sample.data["continuation"][:scored]})
        for sample in measured
    ]
    return short, checks


def _cut(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, prefix: int, count: int
) -> list[Sample]:
    return Perplexity(texts=(path,), prefix=prefix, scored=SCORED, windows=count).samples(model, tokenizer)


def _holds(folder: Path, path: Path) -> bool:
    """True for the same path, or a path in a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def _windows(model: PreTrainedModel, samples: Sequence[Sample]) -> list[Callable[[], Window]]:
    return [partial(Window, model, sample, STEP_TOKENS) for sample in samples]


def _named(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])


def _line(found: Certificate) -> str:
    spread = "" if found.kl_stderr is None else f" ± {found.kl_stderr:.4f}"
    return (
        f"{found.bits:.3f} bits per packed number, KL {found.kl:.4f}{spread} (99.9 %: {found.kl_999:.3f}), "
        f"same top token {found.top1:.3f}, perplexity {found.perplexity:.2f}"
    )


def _header(model: PreTrainedModel, wanted: str, text: str, check: str, results: dict[str, Certificate]) -> str:
    lines = [
        f"Tuned by `kvcache-compress tune` for {Path(model.name_or_path or type(model).__name__).name}, {wanted}.",
        f"Measured on {text}; certified on {check}, with the full cache as reference:",
        *(f"  {name}: {_line(found)}" for name, found in results.items()),
    ]
    return "".join(f"# {line}\n" for line in lines)


def _yaml(config: CompressionConfig) -> str:
    fields = ("keys", "values", "sink_tokens", "recent_tokens")
    sides = {name: value for name, value in config.model_dump(mode="json").items() if name in fields}
    return yaml.safe_dump(sides, default_flow_style=None, sort_keys=False) + (
        rules_yaml(config) if config.layers else ""
    )


def _table(title: str, results: dict[str, Certificate]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("cache", "bits", "KL", "99.9 %", "same top", "perplexity"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=heading != "cache")
    for name, found in results.items():
        spread = "" if found.kl_stderr is None else f" ± {found.kl_stderr:.4f}"
        cells = f"{found.bits:.3f}", f"{found.kl:.4f}{spread}", f"{found.kl_999:.3f}", f"{found.top1:.3f}"
        table.add_row(name, *cells, f"{found.perplexity:.2f}")
    return table
