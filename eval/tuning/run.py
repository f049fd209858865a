"""Tune a config with bits by layer and side for one model and budget, and validate it on other text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.cache.estimate import ModelShape
from kvcache_compress.codecs.base import LEAST_TOKENS, SIDES
from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.runner.progress import Progress
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.eval.tasks.scoring import text_name
from kvcache_compress.modeling.facts import head_shape
from kvcache_compress.validation import parse_size, quoted

from .sensitivity import Choices, Sensitivity, measure, score_configs, with_bits
from .tune import Budget, tune

LEVELS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Bits that a side of a layer may have, if its method has them."""
CHECKS, CHECKED = 3, 2048
"""A config is validated on this many windows of each text, and on this many tokens in all, if the texts are long."""
SCORED = 256
"""Tokens scored in each of these windows."""


def tune_config(
    model: str, texts: Sequence[Path], output: Path, *, bits: float | None = None, memory: str | None = None,
    context: str | None = None, batch: int = 1, check_texts: Sequence[Path] = (), base: str = "best-2bit",
    levels: Sequence[float] = LEVELS, windows: int = 2, prefix: int = 1024, scored: int = 96,
    codebooks: Path | None = None, statistics: Path | None = None, dtype: str = "float32", device: str | None = None,
    on_progress: Progress | None = None,
) -> tuple[str, dict[str, dict[str, float]]]:  # fmt: skip
    """Tune a config and write it to `output`; an interrupted run goes on from the file `output.measured.jsonl`.

    The arguments are the options of `kvcache-compress tune`, whose help explains them. Give a budget as `bits`, or as
    `memory` with `context`. Without `texts` a text of the package is used. Returns the budget with the texts, and the
    scores of each config on these texts, with `packed_bits`.

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
    if bits is not None and not bits > 0:
        raise ValueError(f"bits={bits:g}: must be above 0")
    if scored > SCORED:
        raise ValueError(f"scored={scored}: must be at most {SCORED}")
    asked = None if memory is None else (parse_size(memory, "memory"), parse_size(context or "", "context"))
    preset = load_config(base).with_files(codebooks=codebooks, statistics=statistics)
    config = preset.model_copy(update={"layers": [], "bits_by_layer": None})
    choices: Choices = {"keys": with_bits(config.keys, levels), "values": with_bits(config.values, levels)}
    texts = texts or (DEFAULT_TEXT,)
    loaded, tokenizer = load(model, dtype, device)
    measured, checks = _samples(loaded, tokenizer, texts, check_texts, windows, prefix, scored)
    layers = list(CompressedCache(loaded.config, config).compressed_layers)
    decoder = loaded.config.get_text_config(decoder=True)
    head_dim, heads, _ = head_shape(decoder)
    shape = ModelShape(len(layers), decoder.num_attention_heads, heads, head_dim)
    budget = Budget(shape, bits) if asked is None else Budget(shape, None, *asked, batch)
    # What fits a budget does not depend on losses, so a budget that is too small fails at once.
    equal = {side: [1.0] * len(known) for side, known in choices.items()}
    tune(Sensitivity({(layer, side): 1.0 for layer in layers for side in SIDES}, equal), config, choices, budget)
    record = output.with_name(f"{output.name}.measured.jsonl")
    found = measure(Runner(loaded, tokenizer, record, on_progress=on_progress), layers, measured, config, choices)
    tuned = tune(found, config, choices, budget)
    configs = {"tuned": tuned.config}
    for rival in tuned.rivals:
        sides = {side: getattr(rival, side) for side in SIDES}
        name = ", ".join(f"{side} {chosen.method} {chosen.options().bits:g}" for side, chosen in sides.items())
        packed = prefix - rival.sink_tokens - rival.recent_tokens
        if packed >= LEAST_TOKENS and all(chosen.codec().bit_choices for chosen in sides.values()):
            name, rival = f"{name}, bits_by_layer auto", rival.model_copy(update={"bits_by_layer": "auto"})
        configs[name] = rival
    if not preset.layers and budget.spare(preset) >= -1e-6 and preset not in configs.values():
        configs[base] = preset
    cells = score_configs(Runner(loaded, tokenizer, on_progress=on_progress), "validation", checks, configs)
    losses = {name: cell.scores | {"packed_bits": cell.packed_bits or 0.0} for name, cell in cells.items()}
    best = min(list(losses)[1:], key=lambda name: losses[name]["kl"])
    verdict = f"KL {losses['tuned']['kl'] / losses[best]['kl']:.2f} times that of the best without a file ({best})"
    wanted = f"{bits:g} bits" if memory is None else f"{memory} for {batch} x {context} tokens"
    validated_on = _named(check_texts or texts)
    name = Path(loaded.name_or_path or type(loaded).__name__).name
    header = [
        f"Tuned by `kvcache-compress tune` for {name}, {wanted}.",
        f"Measured on {_named(texts)}; validated on {validated_on}, with the full cache as reference:",
        *(f"  {name}: {loss_text(loss)}" for name, loss in losses.items()),
        verdict,
    ]
    fields = {*SIDES, "sink_tokens", "recent_tokens", "layers"}
    content = tuned.config.model_dump(mode="json", include=fields, exclude_none=True)
    text = yaml.safe_dump(content, default_flow_style=None, sort_keys=False, width=120)
    write_atomically(output, "".join(f"# {line}\n" for line in header) + text)
    return f"{wanted}, {validated_on}; {verdict}", losses


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
    count = max(CHECKS, -(-CHECKED // (SCORED * len(check_texts or texts))))
    checks = [sample for path in check_texts for sample in _cut(model, tokenizer, path, prefix, count)]
    for path in texts:
        found = _cut(model, tokenizer, path, prefix, windows if check_texts else windows + count)
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


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(map(text_name, paths))


def loss_text(loss: dict[str, float]) -> str:
    """The scores of one config in words."""
    spread = f" ± {loss['kl_stderr']:.4f}" if "kl_stderr" in loss else ""
    return (
        f"{loss['packed_bits']:.3f} bits per packed number, KL {loss['kl']:.4f}{spread} "
        f"(99.9 %: {loss['kl_999']:.3f}), same top token {loss['top1']:.3f}, perplexity {loss['perplexity']:.2f}"
    )
