"""Time compressed caches on this CPU. Nothing else should run meanwhile.

    python benchmarks/cpu.py            # steps and prompts of SmolLM2, ten minutes
    python benchmarks/cpu.py --layer    # of one layer of Llama-3.1-8B's shape

Compared caches are interleaved.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from gpu import random_llama
from transformers import Cache, PreTrainedModel

from kvcache_compress import enable_fused_attention
from kvcache_compress.bench.layers import SHAPES
from kvcache_compress.eval.caches.caches import CacheSpec
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import error_message, write_json
from kvcache_compress.eval.runner.load import load
from kvcache_compress.modeling.decoder import cache_argument

CPU = torch.device("cpu")
CACHES = ("full", "turboquant-4bit", "best-4bit", "best-3bit", "best-2bit", "kivi-4bit", "hqq-4", "quanto-4")


def show(row: dict[str, Any]) -> None:
    print(*(f"{name} {value:.4g}" if isinstance(value, float) else value for name, value in row.items()))


def main(
    cache: Annotated[list[str], typer.Option(help="Caches to measure; the first is the reference.")] = [*CACHES],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Lengths of the prompt.")] = [4096, 8000],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps per cache; new tokens are packed once in 32.")] = 32,
    prefills: Annotated[int, typer.Option(help="Prompts per cache.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype of the model.")] = "float32",
    layer: Annotated[bool, typer.Option(help="Measure one layer of Llama-3.1-8B's shape instead of SmolLM2.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file of the results.")] = None,
) -> None:
    """Time steps and prompts of SmolLM2, or of one layer of a larger model."""
    if layer:
        model = random_llama(SHAPES["llama-3.1-8b"], 1, 4096, 14336, 2048, getattr(torch, dtype), CPU)
    else:
        model, _ = load("smollm2-135m", dtype, "cpu")
    rows = []
    for count in tokens:
        ids = torch.randint(1000, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        for row in measure_steps(model, [resolve_cache(name) for name in cache], ids, steps, prefills):
            rows.append(row)
            show(row)
    if output is not None:
        name = "one layer of Llama-3.1-8B's shape" if layer else "SmolLM2-135M"
        write_json(output, {"model": f"{name}, {dtype}", "steps": steps, "rows": rows}, CPU)


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


if __name__ == "__main__":
    typer.run(main)
