"""Measure what a compressed cache adds to the time of a prompt, in one layer of Llama-3.1-8B's shape, on this CPU.

    python benchmarks/studies/prefill_share.py --output benchmarks/results/prefill_share.json
    python benchmarks/studies/prefill_share.py --preset turboquant-4bit --tokens 512 --turns 1

Caches take turns with Transformers' own full one in one process. Times are one thread's processor time, which other
programs disturb least: PyTorch has one thread here. Weights are random and float32, as are CommVQ's codebooks.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, DynamicCache, LlamaModel

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.bench.layers import SHAPES, single_layer
from kvcache_compress.eval.provenance.results import circumstances, write_atomically
from kvcache_compress.modeling.decoder import cache_argument

PRESETS = (
    "turboquant-4bit", "turboquant-2.5bit", "kivi-4bit", "qjl-3bit", "polarquant-rope-4bit", "polarquant-3.4bit",
    "commvq-1bit", "commvq-2bit", "commvq-paper",
)  # fmt: skip
"""One preset of each method and form of codes."""
SHAPE = SHAPES["llama-3.1-8b"]
MLP = 14_336
"""Hidden size of the multi-layer perceptron."""


def one_layer() -> LlamaModel:
    """Model of one layer with fused attention for compressed caches."""
    config, _ = single_layer("turboquant-4bit", SHAPE)
    config.intermediate_size, config.vocab_size = MLP, 1024
    model = LlamaModel(config).eval()
    enable_fused_attention(model)
    return model


def prefill(model: LlamaModel, cache: Cache, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds that a prompt `[1, T]` takes, and those of them spent in the cache's `update`."""
    spent: list[float] = []
    update = cache.update

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        states = update(*args, **kwargs)
        spent.append(time.thread_time() - begun)
        return states

    cache.update = timed  # type: ignore[method-assign]
    begun = time.thread_time()
    model(ids, **{cache_argument(): cache})
    return time.thread_time() - begun, sum(spent)


def rows(model: LlamaModel, presets: list[str], tokens: int, turns: int) -> Iterator[dict[str, Any]]:
    """Medians over the turns of the full cache and each preset; `ratio` and `share` relate to the full one, by turn."""
    configs = {preset: single_layer(preset, SHAPE)[1] for preset in presets}
    ids = torch.randint(1024, (1, tokens))
    by_cache: dict[str, list[tuple[float, float]]] = {name: [] for name in ("full", *configs)}
    for turn in range(turns + 1):
        # Turn 0 is a warm-up, with everything that is compiled or created at first use.
        for name, times in by_cache.items():
            cache = CompressedCache(model.config, configs[name]) if name in configs else DynamicCache()
            took = prefill(model, cache, ids if turn else ids[:, :256])
            times += [took] if turn else []
    for name, times in by_cache.items():
        full = [seconds for seconds, _ in by_cache["full"]]
        yield {
            "cache": name,
            "tokens": tokens,
            "seconds": statistics.median(seconds for seconds, _ in times),
            "update_seconds": statistics.median(update for _, update in times),
            "ratio": statistics.median(seconds / one for (seconds, _), one in zip(times, full, strict=True)),
            "share": statistics.median(update / one for (_, update), one in zip(times, full, strict=True)),
        }


@torch.inference_mode()
def main(
    preset: Annotated[list[str], typer.Option(help="Presets to measure.")] = [*PRESETS],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 4096,
    turns: Annotated[int, typer.Option(min=1, help="Prompts with each cache.")] = 3,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.", dir_okay=False)] = None,
) -> None:
    torch.set_num_threads(1)
    where = circumstances(torch.device("cpu"))
    measured = list(rows(one_layer(), preset, tokens, turns))
    print("| cache | prompt | of full | the cache's part | of full |\n|---|---:|---:|---:|---:|")
    for row in measured:
        cells = f"{row['seconds']:.2f} s | {row['ratio']:.3f} | {row['update_seconds']:.3f} s | {row['share']:.1%}"
        print(f"| {row['cache']} | {cells} |")
    if output is not None:
        contents = {"dtype": "float32", "turns": turns, "mlp": MLP, "rows": measured}
        write_atomically(output, json.dumps(where | contents, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
