"""Time the storing of a decode step's token on this CPU, in a growing cache and in one of static capacity.

    python benchmarks/step_time.py                # every preset; processor time of one thread
    python benchmarks/step_time.py --preset commvq-2bit --turns 3

One layer in float32, keys and values; the time includes encoding, shared among the steps, but not attention.
CommVQ's codebooks are random: its time does not depend on what they hold.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer

from kvcache_compress import CompressedCache
from kvcache_compress.bench.layers import Shape, single_layer
from kvcache_compress.config import preset_names

SHAPES = {"9/3 heads of 64": Shape(9, 3, 64), "32/8 heads of 128": Shape(32, 8, 128)}
CAPACITIES = {"growing": None, "static": 8192}
"""`max_cache_len` of each kind of cache."""
BLOCK = 32
"""Steps over which the time is averaged: tokens are encoded at most once in that many."""


@torch.inference_mode()
def step_ms(preset: str, shape: Shape, turns: int) -> dict[str, float]:
    """Milliseconds per step by kind of cache: median over the turns of the mean over a block of steps."""
    decoder, config = single_layer(preset, shape)
    layers = {
        kind: CompressedCache(decoder, config.model_copy(update={"max_cache_len": capacity})).layers[0]
        for kind, capacity in CAPACITIES.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in layers}
    for tokens in [1024, *[1] * (BLOCK * (turns + 1))]:
        keys, values = (torch.randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        for kind, layer in layers.items():
            begun = time.thread_time()
            layer.append(keys, values)
            times[kind].append(1000 * (time.thread_time() - begun))
    medians = {}
    for kind, steps in times.items():
        blocks = [steps[at : at + BLOCK] for at in range(1, len(steps), BLOCK)]
        medians[kind] = statistics.median(map(statistics.fmean, blocks[1:]))
    return medians


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Presets to measure, by default all.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Blocks of 32 steps, after one that is not counted.")] = 9,
) -> None:
    torch.set_num_threads(1)
    print("| ms of one thread |", *(f" {name}: growing | static |" for name in SHAPES), sep="")
    print("|---|" + "---:|---:|" * len(SHAPES))
    for name in preset or preset_names():
        try:
            by_shape = [step_ms(name, shape, turns) for shape in SHAPES.values()]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        cells = (f" {milliseconds[kind]:.3g} |" for milliseconds in by_shape for kind in CAPACITIES)
        print(f"| `{name}` |", *cells, sep="", flush=True)


if __name__ == "__main__":
    typer.run(main)
