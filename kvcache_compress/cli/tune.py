"""`kvcache-compress tune`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvcache_compress.validation import MOST_TOKENS

from .console import console, errors_as_lines, importing


def tune(
    output: Annotated[Path, typer.Option(help="YAML file to write.", dir_okay=False)],
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")] = "smollm2-135m",
    bits: Annotated[
        float | None, typer.Option(help="Budget in bits per packed number, with everything counted.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Budget for the whole cache, such as 2GB; needs --context.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of each sequence, such as 128K.")] = None,
    batch: Annotated[int, typer.Option(help="Number of sequences.", min=1, max=MOST_TOKENS)] = 1,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file, or folder of .txt files, to measure on; repeatable.")
    ] = None,
    check_text: Annotated[
        list[Path] | None, typer.Option(help="Text to verify the result on, by default the same; repeatable.")
    ] = None,
    base: Annotated[
        str, typer.Option(help="Preset or YAML file to start from: its methods and windows.")
    ] = "best-2bit",
    level: Annotated[
        list[float] | None, typer.Option(help="Bits to choose from for keys and values; repeatable.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Number of windows of each text to measure on.", min=1)] = 2,
    prefix: Annotated[int, typer.Option(help="Number of tokens to prefill.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Number of tokens to score after them.", min=1)] = 96,
    codebooks: Annotated[Path | None, typer.Option(help="CommVQ's file for this model.")] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Spectral's file for this model; by default statistics come from each prompt.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="Device; by default the accelerator if there is one.")] = None,
) -> None:
    """Find the best cache for a model within a budget, layer by layer, and write its config; resumable."""
    with importing():
        from kvcache_compress.eval.runner.progress import ProgressLine
        from kvcache_compress.eval.tuning.run import LEVELS, loss_text, tune_config

    with errors_as_lines():
        title, losses = tune_config(
            model, text or [], output, bits=bits, memory=memory, context=context, batch=batch,
            check_texts=check_text or [], base=base, windows=windows, prefix=prefix, scored=scored,
            codebooks=codebooks, statistics=statistics, dtype=dtype, device=device,
            levels=level or LEVELS, on_progress=ProgressLine(),
        )  # fmt: skip
    console.print(escape(f"{title}:"))
    for name, loss in losses.items():
        console.print(escape(f"{name}: {loss_text(loss)}"), soft_wrap=True)
