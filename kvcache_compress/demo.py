"""Demonstration of `kvcache-compress demo`: one model and one long prompt, with a full and a compressed cache."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.modeling.loading import load_model

from .config import load_config

PASSAGE_TOKENS = 1024
QUESTION = "How often does the light of the lighthouse turn?"


def run_demo(console: Console, model_name: str, preset: str, new_tokens: int) -> None:
    """Print generations from both caches, the memory of both and the loss of the compressed one."""
    from kvcache_compress.eval.caches.caches import full_cache, preset_cache
    from kvcache_compress.eval.runner.runner import Runner
    from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
    from kvcache_compress.eval.tasks.samples import check_fits

    config = load_config(preset)
    console.print(f"[bold]Loading {model_name}[/bold] (the first time takes half a minute) ...")
    model, tokenizer = load_model(model_name)
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    prompt = _prompt(tokenizer, text)
    check_fits(model, prompt.shape[1] + new_tokens, "the text, the question and the new tokens")

    console.print(f"[bold]A question about a text, {prompt.shape[1]} tokens[/bold]; the answers, greedy:\n")
    full_ids, full_s = _generate(model, prompt, DynamicCache(config=model.config), new_tokens)
    enable_fused_attention(model)
    cache = CompressedCache(model.config, config)
    packed_ids, packed_s = _generate(model, prompt, cache, new_tokens)
    disable_fused_attention(model)
    shorter = min(len(full_ids), len(packed_ids))
    same = int((full_ids[:shorter] == packed_ids[:shorter]).long().cumprod(0).sum())
    console.print(f"[dim]full cache, {full_s:.1f} s:[/dim] {tokenizer.decode(full_ids, skip_special_tokens=True)}\n")
    console.print(f"[dim]{preset}, {packed_s:.1f} s:[/dim] {tokenizer.decode(packed_ids, skip_special_tokens=True)}\n")
    console.print(f"The first {same} of {len(full_ids)} tokens are the same.\n")

    report = cache.memory_report()
    console.print(
        f"[bold]Memory:[/bold] {report.packed_tokens} tokens packed at {report.packed_bits_per_number:.2f} bits per "
        f"number, {report.dense_tokens} dense; with everything counted {report.total_bytes / 2**20:.2f} MiB, "
        f"{report.ratio:.2f}x smaller than the full cache in {report.dtype} ({report.full_bytes / 2**20:.2f} MiB). "
        "Dense tokens and rotations weigh less the longer the text is.\n"
    )

    console.print("[bold]Loss[/bold] on one window of 1024 + 256 tokens of the built-in text:")
    specs = [full_cache(), *(preset_cache(name) for name in dict.fromkeys([preset, "turboquant-2bit"]))]
    cells = Runner(model, tokenizer).run("perplexity", Perplexity(windows=1), specs)
    table = Table()
    for heading in ("cache", "bits", "perplexity", "KL", "same top-1"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for cell in cells:
        if cell.error is not None:
            raise ValueError(f"{cell.cache['name']}: {cell.error}")
        figures = (cell.packed_bits or 16, *(cell.scores[name] for name in ("perplexity", "kl", "top1")))
        formats = ("{:.2f}", "{:.2f}", "{:.4f}", "{:.3f}")
        table.add_row(cell.cache["name"], *(form.format(x) for form, x in zip(formats, figures, strict=True)))
    console.print(table)
    console.print("KL is the mean divergence of the next-token distribution from the full cache's, in nats.")


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids `[1, T]` of a passage and a question about it, in the model's chat format where it has one."""
    ids = tokenizer(text, add_special_tokens=False).input_ids[:PASSAGE_TOKENS]
    question = f"{tokenizer.decode(ids)}\n\n{QUESTION}"
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}]
        question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(question, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).input_ids


def _generate(
    model: PreTrainedModel, prompt: torch.Tensor, cache: Cache, new_tokens: int
) -> tuple[torch.Tensor, float]:
    """Generate greedily; returns the new tokens, at most `new_tokens`, and the seconds taken."""
    started = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    return output[0, prompt.shape[1] :], time.perf_counter() - started
