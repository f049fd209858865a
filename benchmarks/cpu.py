"""Time compressed caches on this CPU. Nothing else should run meanwhile.

    python benchmarks/cpu.py           # steps and prompts of SmolLM2, ten minutes; writes benchmarks/results/cpu.json
    python benchmarks/cpu.py prompt    # a cache's share in a prompt; writes benchmarks/results/prefill_share.json

Compared caches are interleaved. `prompt` times one layer on one thread, in float32. CommVQ's codebooks are random,
which does not change its times.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, DynamicCache, LlamaModel, PreTrainedModel

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.bench.layers import SHAPES, single_layer
from kvcache_compress.eval.caches.caches import CacheSpec
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import error_message, write_json
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
SHAPE, MLP = SHAPES["llama-3.1-8b"], 14_336
"""Shape of attention, and hidden size, of the layer whose prompt is timed."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def show(row: dict[str, Any]) -> None:
    print(*(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in row.items()))


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
            rows.append(row)
            show(row)
    write_json(output, {"model": "SmolLM2-135M, float32", "steps": steps, "rows": rows}, CPU)


@torch.inference_mode()
def measure_steps(
    model: PreTrainedModel, specs: Sequence[CacheSpec], ids: torch.Tensor, steps: int, prefills: int = 1
) -> list[dict[str, Any]]:
    """Fill a cache of each kind with the prompt `ids` `[B, T]`, then decode `steps` tokens with each, interleaved.

    Compressed caches use fused attention. The prompt runs `prefills` times per cache, also interleaved, and the fastest
    counts. Ratios are to the first cache, which must not fail, and a step's is the median over the rounds.
    `decode_seconds` is the time of all steps, the slow ones among them in which tokens are packed.
    """
    caches: dict[str, Cache] = {}
    prompts: dict[str, list[float]] = {spec.name: [] for spec in specs}
    times: dict[str, list[float]] = {spec.name: [] for spec in specs}
    errors: dict[str, str] = {}

    def forward(name: str, tokens: torch.Tensor, into: dict[str, list[float]]) -> None:
        begun = time.perf_counter()
        try:
            model(tokens, **{cache_argument(): caches[name]}, logits_to_keep=1)
        except Exception as error:
            errors[name] = error_message(error)
        into[name].append(time.perf_counter() - begun)

    enable_fused_attention(model)
    for spec in specs:  # compilation at first use is not timed
        caches[spec.name] = spec.make(model)
        forward(spec.name, ids[:, :256], {spec.name: []})
    for _ in range(prefills):
        for spec in specs:
            caches[spec.name] = spec.make(model)
            forward(spec.name, ids, prompts)
    for _ in range(steps):
        for name in prompts:
            forward(name, ids[:, -1:], times)
    first, rows = specs[0].name, []
    for name in prompts:
        row: dict[str, Any] = {"cache": name, "tokens": ids.shape[1], "error": errors.get(name)}
        if name not in errors:
            row["step_ms"] = 1e3 * statistics.median(times[name])
            row["ratio"] = statistics.median(x / y for x, y in zip(times[name], times[first], strict=True))
            row["decode_seconds"], row["prefill_seconds"] = sum(times[name]), min(prompts[name])
            row["prefill_ratio"] = min(prompts[name]) / min(prompts[first])
        rows.append(row)
    return rows


@app.command()
@torch.inference_mode()
def prompt(
    preset: Annotated[list[str], typer.Option("--preset", help="Presets to measure.")] = [*PRESETS],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 4096,
    turns: Annotated[int, typer.Option(min=1, help="Turns that count; one more warms up.")] = 3,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "prefill_share.json",
) -> None:
    """Time what a cache adds to a prompt in one layer of Llama-3.1-8B's shape with random weights; needs 4 GB."""
    measured = list(prompt_rows(one_layer(), preset, tokens, turns))
    for row in measured:
        show(row)
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
    """Seconds that a prompt `[1, T]` takes, and the part of them that the cache's `update` takes.

    They are this thread's processor time, which other programs hardly disturb.
    """
    spent: list[float] = []
    update = cache.update

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        states = update(*args, **kwargs)
        spent.append(time.thread_time() - begun)
        return states

    cache.update = timed
    begun = time.thread_time()
    layer(ids, **{cache_argument(): cache})
    return time.thread_time() - begun, sum(spent)


if __name__ == "__main__":
    app()
