"""Demonstration of `kvcache-compress demo`: a question about a long text, from a full and from compressed caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from kvcache_compress.attention.interface import enable_fused_attention
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model
from kvcache_compress.validation import size_text

from .config import load_config

PASSAGE_TOKENS = 4096
WARM_TOKENS = 400
"""Prompt before anything is timed, long enough for statistics."""
NEEDLE = "\n\nThe pass key is 71839. Remember it: 71839 is the pass key.\n\n"
QUESTION = "What is the pass key? The pass key is"


@dataclass
class Run:
    """One cache's answer: seconds until its first token, seconds per further token, and bytes that the cache holds."""

    name: str
    first: float
    step: float
    held: int


class _Stream(TextStreamer):
    """Prints new tokens as they come, and notes when."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)


def run_demo(console: Console, model_name: str, presets: Sequence[str], new_tokens: int) -> None:
    """Print the answers from all caches as they are generated, and a table of their times, memory and losses."""
    from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
    from kvcache_compress.eval.tasks.samples import check_fits

    configs = {name: load_config(name) for name in presets}
    console.print(f"[bold]Loading {model_name}[/bold] (the first time takes half a minute) ...")
    model, tokenizer = load_model(model_name)
    for config in configs.values():
        CompressedCache(model.config, config)  # refuses models without attention before anything runs
    enable_fused_attention(model)
    prompt = _prompt(tokenizer, DEFAULT_TEXT.read_text(encoding="utf-8"))
    check_fits(model, prompt.shape[1] + new_tokens, "the text, the question and the new tokens")

    def make(name: str) -> Cache:
        return CompressedCache(model.config, configs[name]) if name in configs else DynamicCache(config=model.config)

    names = ["full cache", *configs]
    for name in names:  # compiles what needs to be compiled, before anything is timed
        _generate(model, prompt[:, :WARM_TOKENS], make(name), 2, None)
    console.print(f"\n[bold]A text of {prompt.shape[1]} tokens with a pass key in its middle, and the question:[/bold]")
    runs = []
    for name in names:
        console.print(f"[bold]{name}:[/bold] [dim]{QUESTION}[/dim]", end="")
        cache, stream = make(name), _Stream(tokenizer)
        _generate(model, prompt, cache, new_tokens, stream)
        start, first, *rest = stream.times
        runs.append(Run(name, first - start, (rest[-1] - first) / len(rest) if rest else 0.0, _held(cache)))
        console.print()
    losses = _losses(console, model, tokenizer, list(configs))
    table = Table()
    for heading in ("cache", "memory", "first token", "each further", "KL", "same top"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for run in runs:
        loss = losses.get(run.name, ("0", "1.000"))
        table.add_row(run.name, size_text(run.held), f"{run.first:.1f} s", f"{1000 * run.step:.0f} ms", *loss)
    console.print(table)
    console.print(
        "Memory with 16 bits for each uncompressed number; the dense windows, tables and room for more tokens in it "
        "weigh less in longer texts. KL: mean divergence of the next-token distribution from the "
        "full cache's, in nats, and share of equal most likely tokens, on 128 tokens after the text's first 1,024."
    )


def _losses(
    console: Console, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, presets: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """KL and share of equal most likely tokens of each preset, on one window of the built-in text."""
    from kvcache_compress.eval.caches.caches import full_cache, preset_cache
    from kvcache_compress.eval.runner.progress import ProgressLine
    from kvcache_compress.eval.runner.runner import Runner
    from kvcache_compress.eval.tasks.perplexity import Perplexity

    console.print("Measuring what is lost ...")
    specs = [full_cache(), *(preset_cache(name) for name in presets)]
    runner = Runner(model, tokenizer, on_progress=ProgressLine())
    cells = runner.run("perplexity", Perplexity(windows=1, scored=128), specs)
    for cell in cells:
        if cell.error is not None:
            raise ValueError(f"{cell.cache['name']}: {cell.error}")
    return {cell.cache["name"]: (f"{cell.scores['kl']:.4f}", f"{cell.scores['top1']:.3f}") for cell in cells[1:]}


def _held(cache: Cache) -> int:
    """Bytes with 16 bits for each number that is not compressed, whatever the model's dtype."""
    if isinstance(cache, CompressedCache):
        return cache.memory_report().total_bytes_at_16
    held = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(2 * x.numel() for x in held if isinstance(x, torch.Tensor))


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids `[1, T]` of a passage with a pass key in its middle, and a question for it."""
    ids = tokenizer(text, add_special_tokens=False).input_ids[:PASSAGE_TOKENS]
    before, after = (tokenizer.decode(part) for part in (ids[: len(ids) // 2], ids[len(ids) // 2 :]))
    return tokenizer(f"{before}{NEEDLE}{after}\n\n{QUESTION}", return_tensors="pt").input_ids


def _generate(
    model: PreTrainedModel, prompt: torch.Tensor, cache: Cache, new_tokens: int, stream: TextStreamer | None
) -> None:
    """Generate greedily."""
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{cache_argument(): cache},
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=stream,
    )
