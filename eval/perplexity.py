"""What a compressed cache costs in quality: perplexity, KL divergence and top-1 agreement under forced cached decoding.

A text is cut into windows of a prefix and a continuation. For each cache and window, the prefix is prefilled, and then
the continuation is fed in forward passes of `step` tokens, so that every one of its tokens attends to the prefix as the
cache kept it; scoring a whole text in one pass would use no cache at all. The yardstick is the same procedure with an
uncompressed cache.

Tokens of one pass see each other before they are compressed. With few tokens per pass they do not, as in generation,
and a cache without a recent window shows about twice the KL of a single pass: figures compare only at the same `step`.
The default of 16 gives the KL of token-by-token decoding in a fifth of its time.

    python -m kvcache_compress.eval.perplexity --cache turboquant-4bit --cache hqq-4 --output perplexity.json
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches import CacheSpec, Measured, full_cache, preset_cache
from kvcache_compress.eval.peers import PEERS
from kvcache_compress.eval.results import (
    CacheRow,
    PerplexityResult,
    command_line,
    git_commit,
    hardware,
    markdown_table,
    package_versions,
    terminal_table,
    write_atomically,
)
from kvcache_compress.eval.scoring import compare_logits, cut_windows
from kvcache_compress.models import SMOLLM2, load_model

__all__ = [
    "CacheSpec",
    "Measured",
    "PerplexityResult",
    "evaluate_caches",
    "full_cache",
    "markdown_table",
    "preset_cache",
    "resolve_cache",
]

DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")
DEFAULT_CACHES = ["turboquant-4bit", "turboquant-2bit"]


def evaluate_caches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    specs: Sequence[CacheSpec],
    *,
    prefix: int = 1024,
    scored: int = 256,
    windows: int = 6,
    step: int | None = None,
    text_name: str = "text",
    on_progress: Callable[[int, int, str], None] | None = None,
) -> PerplexityResult:
    """Measure caches against the full one.

    With continuation c_0 … c_(S-1), perplexity scores all S tokens, c_0 by the prefill's last logits. KL and top-1 are
    over the logits after each of the S tokens fed, all of which went through the cache; the prefill's logits, which
    most caches give exactly, would only dilute them.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        text: what is read; tokenized once.
        specs: caches to measure besides the full one, with distinct names.
        prefix: tokens prefilled.
        scored: tokens of the continuation.
        windows: windows wanted; fewer, with a warning, if the text is short (see `cut_windows`).
        step: tokens per forward pass of the continuation; all at once when None, 1 is as in generation.
        text_name: name of the text in the result.
        on_progress: called before each run, and at the end, with the runs done, the runs in all, and what comes now.

    Raises:
        ValueError: a size that is not allowed, a text too short, equal names, a cache that compressed nothing, or one
            whose logits are not finite.
    """
    specs = [full_cache(), *specs]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"specs={names[1:]}: allowed are distinct names other than 'full', which is always measured")
    step = scored if step is None else step
    if not 1 <= step <= scored:
        raise ValueError(f"step={step}: allowed 1 to scored={scored}")
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    batches = cut_windows(token_ids, prefix=prefix, scored=scored, windows=windows, bos=tokenizer("")["input_ids"])
    prefix = batches[0].shape[1] - scored

    scores: list[list[_Score]] = [[] for _ in specs]
    total = len(batches) * len(specs)
    for number, window in enumerate(batches):
        reference: torch.Tensor | None = None
        for index, spec in enumerate(specs):
            if on_progress is not None:
                on_progress(number * len(specs) + index, total, f"{spec.name}, window {number + 1} of {len(batches)}")
            logits, measured, seconds = _run_window(model, spec, window.to(model.device), prefix, step)
            reference = logits if reference is None else reference
            nll, kl, top1 = compare_logits(reference, logits, window[0, prefix:])
            scores[index].append(_Score(measured, nll, kl, top1, seconds))
    if on_progress is not None:
        on_progress(total, total, "done")

    return PerplexityResult(
        model=model.name_or_path or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        text=text_name,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        prefix=prefix,
        scored=scored,
        windows=len(batches),
        step=step,
        rows=[_summarize(spec.name, of_cache) for spec, of_cache in zip(specs, scores, strict=True)],
        command=None,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=git_commit(),
        versions=package_versions(),
        hardware=hardware(model.device),
    )


@dataclasses.dataclass(frozen=True)
class _Score:
    measured: Measured
    nll: float
    kl: float
    top1: float
    seconds: float


@torch.inference_mode()
def _run_window(
    model: PreTrainedModel, spec: CacheSpec, window: torch.Tensor, prefix: int, step: int
) -> tuple[torch.Tensor, Measured, float]:
    """Run a window of shape [1, prefix + S] through a new cache: logits [S + 1, V], what the cache held, seconds."""
    cache = spec.make(model)
    started = time.perf_counter()
    logits = [model(input_ids=window[:, :prefix], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]]
    seconds = time.perf_counter() - started
    # Measured before the continuation: these are the tokens that it can only see compressed.
    measured = spec.measure(cache)
    if measured.packed_tokens == 0 and not spec.lossless:
        raise ValueError(
            f"cache={spec.name!r}: nothing is compressed after a prefix of {prefix} tokens, so there is nothing to "
            "measure; take a longer prefix, or fewer sinks and recent tokens"
        )
    started = time.perf_counter()
    for tokens in window[:, prefix:].split(step, dim=1):
        logits.append(model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0])
    joined = torch.cat(logits).float()
    if not joined.isfinite().all():
        raise ValueError(f"cache={spec.name!r}: the model's logits are not finite")
    return joined, measured, seconds + time.perf_counter() - started


def _summarize(name: str, scores: list[_Score]) -> CacheRow:
    window_kl = [score.kl for score in scores]
    return CacheRow(
        name=name,
        **dataclasses.asdict(scores[-1].measured),
        perplexity=math.exp(statistics.fmean(score.nll for score in scores)),
        kl=statistics.fmean(window_kl),
        kl_stderr=statistics.stdev(window_kl) / math.sqrt(len(scores)) if len(scores) > 1 else None,
        top1=statistics.fmean(score.top1 for score in scores),
        seconds=sum(score.seconds for score in scores),
        window_kl=window_kl,
    )


def resolve_cache(
    name: str, *, sink_tokens: int | None = None, recent_tokens: int | None = None, codebooks: Path | None = None
) -> CacheSpec:
    """Turn a name from the command line into a spec.

    Args:
        name: `full`, a peer (`hqq-4`, `hqq-2`, `quanto-4`, `quanto-2`, `fp8`), or anything that `load_config` takes.
            Presets can be followed by their own dense windows, hqq and quanto by their residual length:
            `turboquant-4bit@sinks=0,recent=0`, `hqq-4@residual=64`.
        sink_tokens: for presets that do not say `sinks` themselves.
        recent_tokens: for presets that do not say `recent` themselves.
        codebooks: for presets with learned codebooks.

    Raises:
        ValueError: no such cache, or options that it does not have.
        ImportError: the peer's package is not installed.
    """
    base, _, given = name.partition("@")
    if base == "full" or base in PEERS:
        allowed = ["residual"] if base.startswith(("hqq", "quanto")) else []
    else:
        allowed = ["sinks", "recent"]
    options: dict[str, int] = {}
    for option in given.split(",") if given else []:
        key, _, number = option.partition("=")
        if key not in allowed or not number.isdecimal():
            forms = " and ".join(f"{key}=N" for key in allowed) or "nothing"
            raise ValueError(f"cache={name!r}: allowed after @ is {forms}")
        options[key] = int(number)
    if base == "full":
        return full_cache()
    if base in PEERS:
        spec = PEERS[base](residual_length=options["residual"]) if options else PEERS[base]()
        return dataclasses.replace(spec, name=name)
    sinks, recent = options.get("sinks", sink_tokens), options.get("recent", recent_tokens)
    try:
        return preset_cache(base, sink_tokens=sinks, recent_tokens=recent, codebooks=codebooks, name=name)
    except ValueError as error:
        raise ValueError(f"cache={name!r}: allowed full, {', '.join(PEERS)}, or a preset: {error}") from error


app = typer.Typer(add_completion=False)


@app.command()
def main(
    cache: Annotated[
        list[str],
        typer.Option(help=f"preset, YAML file or peer ({', '.join(PEERS)}), PRESET@sinks=0,recent=0; repeatable"),
    ] = DEFAULT_CACHES,
    model: Annotated[str, typer.Option(help="model: smollm2-135m, a hub id or a folder")] = SMOLLM2,
    text: Annotated[Path, typer.Option(help="text file", exists=True, dir_okay=False)] = DEFAULT_TEXT,
    prefix: Annotated[int, typer.Option(help="tokens prefilled")] = 1024,
    scored: Annotated[int, typer.Option(help="tokens scored after them")] = 256,
    windows: Annotated[int, typer.Option(help="windows of prefix + scored tokens")] = 6,
    step: Annotated[int, typer.Option(help="scored tokens per forward pass; 1 is as in generation")] = 16,
    sink_tokens: Annotated[int | None, typer.Option(min=0, help="replaces the presets' own")] = None,
    recent_tokens: Annotated[int | None, typer.Option(min=0, help="replaces the presets' own")] = None,
    codebooks: Annotated[
        Path | None, typer.Option(help="file of `kvcache-compress calibrate`, for CommVQ", exists=True, dir_okay=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    device: Annotated[str, typer.Option(help="device of the model")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="JSON file to write", dir_okay=False)] = None,
) -> None:
    """Measure perplexity, KL and top-1 agreement of compressed caches against the full one."""
    try:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={dtype!r}: allowed float32, bfloat16, float16")
        names = [name for name in dict.fromkeys(cache) if name != "full"]  # the full cache is always there
        windows_of = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
        specs = [resolve_cache(name, **windows_of, codebooks=codebooks) for name in names]
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
        loaded, tokenizer = load_model(model, dtype=getattr(torch, dtype), device=device)
        result = evaluate_caches(
            loaded,
            tokenizer,
            text.read_text(encoding="utf-8"),
            specs,
            prefix=prefix,
            scored=scored,
            windows=windows,
            step=step,
            text_name="/".join(text.resolve().parts[-2:]),
            on_progress=_progress_line(),
        )
    except (ValueError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    # Where the output is no terminal, its width is unknown: eight columns should not be squeezed into the usual 80.
    Console(width=None if sys.stdout.isatty() else 140).print(terminal_table(result))
    if output is not None:
        write_atomically(output, dataclasses.replace(result, command=command_line()).to_json())


def _progress_line() -> Callable[[int, int, str], None]:
    """Progress on stderr: one line that renews itself on a terminal, a line per run elsewhere."""
    started = time.monotonic()

    def show(done: int, total: int, label: str) -> None:
        left = f", {(time.monotonic() - started) / done * (total - done):.0f} s left" if done else ""
        line = f"[{done}/{total}] {label}{left}"
        sys.stderr.write(f"\r\033[K{line}" + "\n" * (done == total) if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()

    return show


if __name__ == "__main__":
    app()
