"""Time compressed caches on this CPU. Nothing else should run meanwhile.

    python benchmarks/cpu.py           # steps and prompts of SmolLM2, ten minutes; writes benchmarks/results/cpu.json
    python benchmarks/cpu.py prompt    # a cache's share in a prompt; writes benchmarks/results/prefill_share.json
    python benchmarks/cpu.py encode    # encoding keys and values, in torch and in C++; prints a table
    python benchmarks/cpu.py store     # storing a step's token in growing and static caches; prints a table

Compared caches are interleaved. All commands but the first time one layer on one thread, in float32. CommVQ's codebooks
are random, which does not change its times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, DynamicCache, LlamaModel

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.decode import random_view
from kvcache_compress.bench.layers import SHAPES, Shape, single_layer
from kvcache_compress.bench.steps import measure_steps
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

RESULTS = Path(__file__).resolve().parent / "results"
CPU = torch.device("cpu")
CACHES = ("full", "turboquant-4bit", "best-4bit", "best-3bit", "best-2bit", "kivi-4bit", "hqq-4", "quanto-4")
PRESETS = (
    "turboquant-4bit", "turboquant-2.5bit", "kivi-4bit", "qjl-3bit", "polarquant-rope-4bit", "polarquant-3.4bit",
    "commvq-1bit", "commvq-2bit", "commvq-paper",
)  # fmt: skip
"""One preset of each method and form of codes."""
HEADS = {"9/3 heads of 64": Shape(9, 3, 64), "32/8 heads of 128": Shape(32, 8, 128)}
SHAPE, MLP = SHAPES["llama-3.1-8b"], 14_336
"""Shape of attention, and hidden size, of the layer whose prompt is timed."""
BLOCK = 32
"""Steps over which the time of storing is averaged, as tokens are packed once in that many steps."""
Presets = Annotated[list[str], typer.Option("--preset", help="Presets to measure.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns that count; one more warms up.")]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def thread_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of this thread's processor time, which other programs hardly disturb."""
    begun = time.thread_time()
    call()
    return 1000 * (time.thread_time() - begun)


@app.callback(invoke_without_command=True)
def model(
    context: typer.Context,
    cache: Annotated[list[str], typer.Option(help="Caches to measure; the first is the reference.")] = [*CACHES],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Lengths of the prompt.")] = [4096, 8000],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps per cache; new tokens are packed once in 32.")] = 32,
    prefills: Annotated[int, typer.Option(help="Prompts per cache.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "cpu.json",
) -> None:
    """Time steps and prompts of SmolLM2, unless another command is given."""
    if context.invoked_subcommand is not None:
        torch.set_num_threads(1)
        return
    smollm2, _ = load_model("smollm2-135m")
    rows = []
    for count in tokens:
        ids = torch.randint(1000, smollm2.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        for row in measure_steps(smollm2, [resolve_cache(name) for name in cache], ids, steps, prefills):
            rows.append(asdict(row))
            print(
                row.error
                or f"{count} {row.cache}: {row.step_ms:.1f} ms, {row.ratio:.2f}x; prompt {row.prefill_ratio:.2f}x"
            )
    write_json(output, {"model": "SmolLM2-135M, float32", "steps": steps, "rows": rows}, CPU)


@app.command()
@torch.inference_mode()
def prompt(
    preset: Presets = [*PRESETS],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 4096,
    turns: Turns = 3,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "prefill_share.json",
) -> None:
    """Time what a cache adds to a prompt in one layer of Llama-3.1-8B's shape with random weights; needs 4 GB."""
    measured = list(prompt_rows(one_layer(), preset, tokens, turns))
    lines = [
        [
            row["cache"], f"{row['seconds']:.2f} s", f"{row['ratio']:.3f}", f"{row['update_seconds']:.3f} s",
            f"{row['share']:.1%}",
        ]
        for row in measured
    ]  # fmt: skip
    print(markdown_table(["cache", "prompt", "of full", "the cache's part", "of full"], lines))
    write_json(output, {"dtype": "float32", "turns": turns, "mlp": MLP, "rows": measured}, CPU)


def one_layer() -> LlamaModel:
    """A model of one layer, with fused attention for compressed caches."""
    config, _ = single_layer("turboquant-4bit", SHAPE)
    config.intermediate_size, config.vocab_size = MLP, 1024
    layer = LlamaModel(config).eval()
    enable_fused_attention(layer)
    return layer


def prompt_rows(layer: LlamaModel, presets: list[str], tokens: int, turns: int) -> Iterator[dict[str, Any]]:
    """Medians over turns for the full cache and each preset; `ratio` and `share` are relative to the full cache."""
    configs = {preset: single_layer(preset, SHAPE)[1] for preset in presets}
    ids = torch.randint(1024, (1, tokens))
    by_cache: dict[str, list[tuple[float, float]]] = {name: [] for name in ("full", *configs)}
    for turn in range(turns + 1):
        for name, times in by_cache.items():
            cache = CompressedCache(layer.config, configs[name]) if name in configs else DynamicCache()
            took = time_prompt(layer, cache, ids if turn else ids[:, :256])
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


def time_prompt(layer: LlamaModel, cache: Cache, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds that a prompt `[1, T]` takes, and the part of them that the cache's `update` takes."""
    spent: list[float] = []
    update = cache.update

    def timed(*args: Any, **kwargs: Any) -> Any:
        states: list[Any] = []
        spent.append(thread_ms(lambda: states.append(update(*args, **kwargs))) / 1000)
        return states[0]

    cache.update = timed
    seconds = thread_ms(lambda: layer(ids, **{cache_argument(): cache})) / 1000
    return seconds, sum(spent)


@app.command()
@torch.inference_mode()
def encode(
    preset: Presets = [*PRESETS],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are encoded together.")] = 4096,
    turns: Turns = 9,
) -> None:
    """Time the encoding of a prompt's keys and values in torch and in C++."""
    lines = []
    for name in preset:
        for side in SIDES:
            times: list[float] = []
            for shape in HEADS.values():
                keys, values, _ = random_view(name, shape, 1, tokens, CPU, torch.float32)
                view = keys if side == "keys" else values
                x, rope = torch.randn(1, shape.kv_heads, tokens, shape.head_dim), view.rope(0, tokens)
                codecs = [BACKENDS[backend].bind(view.codec) for backend in ("torch", "cpp")]
                turned = [[thread_ms(lambda: codec.encode(x, rope)) for codec in codecs] for _ in range(turns + 1)]  # noqa: B023
                times += map(statistics.median, zip(*turned[1:], strict=True))
            lines.append([f"`{name}`", side, *(f"{ms:.3g}" for ms in times)])
    heads = [f"{name}: {backend}" for name in HEADS for backend in ("torch", "C++")]
    print(markdown_table(["ms of one thread", "side", *heads], lines, texts=(0, 1)))


@app.command()
@torch.inference_mode()
def store(preset: Presets = [*PRESETS], turns: Turns = 9) -> None:  # noqa: B006
    """Time the storing of a step's token after 1,024 tokens, with its share of encoding and without attention."""
    lines = []
    for name in preset:
        medians: list[float] = []
        for shape in HEADS.values():
            decoder, config = single_layer(name, shape)
            layers = [
                CompressedCache(decoder, config.changed(max_cache_len=capacity)).layers[0] for capacity in (None, 8192)
            ]
            times = []
            for tokens in [1024, *[1] * (BLOCK * (turns + 1))]:
                new = [torch.randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2)]
                times.append([thread_ms(lambda: layer.append(*new)) for layer in layers])  # noqa: B023
            for steps in zip(*times[1 + BLOCK :], strict=True):
                blocks = [steps[at : at + BLOCK] for at in range(0, len(steps), BLOCK)]
                medians.append(statistics.median(map(statistics.fmean, blocks)))
        lines.append([f"`{name}`", *(f"{ms:.3g}" for ms in medians)])
    heads = [f"{name}: {layer}" for name in HEADS for layer in ("growing", "static")]
    print(markdown_table(["ms of one thread", *heads], lines))


if __name__ == "__main__":
    app()
