"""What storing the token of a decode step takes on this machine's CPU, in a cache that grows and in one of fixed size.

    python benchmarks/step_time.py                # every preset; processor time of one thread
    python benchmarks/step_time.py --preset commvq-2bit --turns 3

One layer in float32, keys and values; what encoding costs is in it, shared among the steps, and attention is not.
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
ROOMS = {"growing": None, "fixed": 8192}
"""`max_cache_len` of each kind of cache."""
BLOCK = 32
"""Steps that share an encoding where it is shared."""


@torch.inference_mode()
def step_ms(preset: str, shape: Shape, turns: int) -> dict[str, float]:
    """Milliseconds per step by kind of cache: the mean of a block of steps, of all turns' the median."""
    decoder, config = single_layer(preset, shape)
    layers = {
        kind: CompressedCache(decoder, config.model_copy(update={"max_cache_len": room})).layers[0]
        for kind, room in ROOMS.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in layers}
    for tokens in [1024, *[1] * (BLOCK * (turns + 1))]:
        keys, values = (torch.randn(1, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
        for kind, layer in layers.items():
            begun = time.thread_time()
            layer.store(keys, values)
            times[kind].append(1000 * (time.thread_time() - begun))
    blocks = {kind: [found[at : at + BLOCK] for at in range(1, len(found), BLOCK)] for kind, found in times.items()}
    return {kind: statistics.median(map(statistics.fmean, found[1:])) for kind, found in blocks.items()}


def main(
    preset: Annotated[list[str] | None, typer.Option(help="Presets to measure, by default all.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Blocks of 32 steps, after one that is not counted.")] = 9,
) -> None:
    torch.set_num_threads(1)
    print("| ms of one thread |", *(f" {name}: growing | fixed |" for name in SHAPES), sep="")
    print("|---|" + "---:|---:|" * len(SHAPES))
    for name in preset or preset_names():
        try:
            found = [step_ms(name, shape, turns) for shape in SHAPES.values()]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        print(f"| `{name}` |", *(f" {took[kind]:.3g} |" for took in found for kind in ROOMS), sep="", flush=True)


if __name__ == "__main__":
    typer.run(main)
