"""Time decode steps and prefill of SmolLM2 on this CPU, with compressed caches, Transformers' own and a full one.

    python benchmarks/cpu.py                       # to benchmarks/results/cpu.json
    python benchmarks/cpu.py --tokens 512 --steps 4 --output F

About ten minutes on two cores, during which nothing else should run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from kvcache_compress.bench.steps import measure_steps
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.provenance.results import circumstances, write_atomically
from kvcache_compress.modeling.loading import load_model

RESULTS = Path(__file__).resolve().parent / "results" / "cpu.json"
CACHES = ("full", "turboquant-4bit", "best-4bit", "best-3bit", "best-2bit", "kivi-4bit", "hqq-4", "quanto-4")


def main(
    cache: Annotated[list[str], typer.Option(help="Caches to measure; the first is the reference.")] = [*CACHES],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Lengths of the prompt.")] = [4096, 8000],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps per cache; new tokens are packed once in 32.")] = 32,
    prefills: Annotated[int, typer.Option(help="Prompts per cache.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS,
) -> None:
    model, _ = load_model("smollm2-135m")
    where, rows = circumstances(torch.device("cpu")), []
    for count in tokens:
        ids = torch.randint(1000, model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        for row in measure_steps(model, [resolve_cache(name) for name in cache], ids, steps, prefills):
            rows.append(asdict(row))
            print(
                row.error
                or f"{count} {row.cache}: {row.step_ms:.1f} ms, {row.ratio:.2f}x; prompt {row.prefill_ratio:.2f}x"
            )
    result = {"model": "SmolLM2-135M, float32", "steps": steps, "rows": rows}
    write_atomically(output, json.dumps(result | where, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
