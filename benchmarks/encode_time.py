"""Time the encoding of a prompt's keys and values on this CPU, in torch and in C++, in turns.

    python benchmarks/encode_time.py              # processor time of one thread: other programs hardly disturb it
    python benchmarks/encode_time.py --threads 2  # wall-clock time
    python benchmarks/encode_time.py --preset commvq-2bit --tokens 32

One layer and one side per line. CommVQ's codebooks are random: its time does not depend on what they hold.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, get_args

import torch
import typer

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.layers import Shape, encoded_side, middle_layer, named_config
from kvcache_compress.codecs.base import Side

PRESETS = (
    "turboquant-4bit", "turboquant-2.5bit", "kivi-4bit", "qjl-3bit", "polarquant-rope-4bit", "polarquant-3.4bit",
    "commvq-1bit", "commvq-2bit", "commvq-paper",
)  # fmt: skip
SHAPES = {"9/3 heads of 64": Shape(9, 3, 64), "32/8 heads of 128": Shape(32, 8, 128)}
NAMES = "torch", "cpp"


@torch.inference_mode()
def encode_ms(preset: str, side: Side, shape: Shape, tokens: int, turns: int) -> dict[str, float]:
    """Median milliseconds per backend to encode one side of one layer, float32."""
    plan = middle_layer(named_config(preset)).side(side)
    layer_side = encoded_side(
        plan.method, plan.options(), side, shape.head_dim, torch.float32,
        heads=shape.kv_heads, packed=tokens, codes="random",
    )  # fmt: skip
    x = torch.randn(1, shape.kv_heads, tokens, shape.head_dim)
    rope = None if layer_side.track is None else layer_side.track.read(0, tokens)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    encoders = {name: BACKENDS[name].bind(layer_side.codec) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(turns + 1):
        for backend, milliseconds in times.items():
            begun = clock()
            encoders[backend].encode(x, rope)
            milliseconds.append(1000 * (clock() - begun))
    return {backend: statistics.median(milliseconds[1:]) for backend, milliseconds in times.items()}


def main(
    preset: Annotated[list[str], typer.Option(help="Presets to measure.")] = [*PRESETS],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are encoded together.")] = 4096,
    turns: Annotated[int, typer.Option(min=1, help="Runs of each, after one that is not counted.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch.")] = 1,
) -> None:
    torch.set_num_threads(threads)
    print(f"| ms of {'one thread' if threads == 1 else f'{threads} threads'} | side |", end="")
    print(*(f" {name}: torch | C++ |" for name in SHAPES), sep="")
    print("|---|---|" + "---|---|" * len(SHAPES))
    for name in preset:
        for side in get_args(Side):
            try:
                by_shape = [encode_ms(name, side, shape, tokens, turns) for shape in SHAPES.values()]
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            times = (milliseconds[backend] for milliseconds in by_shape for backend in NAMES)
            cells = (f" {ms:,.0f} |" if ms >= 100 else f" {ms:.3g} |" for ms in times)
            print(f"| `{name}` | {side} |", *cells, sep="", flush=True)


if __name__ == "__main__":
    typer.run(main)
