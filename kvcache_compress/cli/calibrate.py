"""`kvcache-compress calibrate`."""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .console import console, errors_as_lines, importing


def calibrate(
    text: Annotated[list[str], typer.Option(help="Text file; repeatable.")],
    output: Annotated[Path, typer.Option(help="The .safetensors file to write.")],
    method: Annotated[str, typer.Option(help="Method to calibrate: commvq or spectral.")] = "commvq",
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a path.")] = "smollm2-135m",
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of text to use. Default: commvq 55296 (with --quick 18432), spectral 8192."),
    ] = None,
    bits: Annotated[int | None, typer.Option(help="commvq: code bits per number, 1 or 2 (default).")] = None,
    values: Annotated[
        str | None, typer.Option(help="commvq: how values are coded: residual (default), or encoder as in the paper.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="commvq: less text and fewer steps.")] = False,
    device: Annotated[str | None, typer.Option(help="Device; by default the GPU if there is one.")] = None,
) -> None:
    """Calibrate a method on your model and write the result to a file: CommVQ's codebooks, or spectral's statistics."""
    options = {"tokens": tokens, "bits": bits, "values": values, "quick": quick or None}
    started = time.perf_counter()
    with errors_as_lines():
        if method not in ("commvq", "spectral"):
            raise ValueError(f"method={method!r}: must be commvq or spectral; other methods need no calibration")
        chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if method == "spectral" and (others := chosen.keys() - {"tokens"}):
            raise ValueError(f"--{min(others)}: not an option of method {method!r}")
        with importing():
            import torch

            from kvcache_compress.cache.calibration import calibrate_spectral
            from kvcache_compress.eval.runner.progress import ProgressLine
            from kvcache_compress.files.lock import only_one
            from kvcache_compress.files.model_file import check_output
            from kvcache_compress.methods.commvq.calibration.calibrate import CommVQSettings, calibrate_commvq
            from kvcache_compress.modeling.calibration_text import check_files
            from kvcache_compress.modeling.loading import load_model
            from kvcache_compress.validation import usable_device

        if method == "commvq":
            settings = CommVQSettings.quick(**chosen) if chosen.pop("quick", False) else CommVQSettings(**chosen)
        check_output(output)
        check_files(text)
        place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
        loaded, tokenizer = load_model(model, dtype=dtype, device=place)
        with only_one(output.with_name(f".{output.name}.lock")):
            if method == "spectral":
                calibrate_spectral(loaded, tokenizer, text, output, **chosen)
            else:
                losses = calibrate_commvq(loaded, tokenizer, text, output, settings, ProgressLine())
                console.print(_loss_table(losses))
    minutes, size = (time.perf_counter() - started) / 60, output.stat().st_size / 2**20
    console.print(f"{output}: {size:.1f} MiB in {minutes:.1f} minutes", soft_wrap=True)


def _loss_table(losses: dict[str, Any]) -> Table:
    """Table of mean squared errors of normalized vectors, on training windows and on held-out ones."""
    table = Table(title="mean squared error of normalized vectors, over layers and heads")
    for heading in ("side", "rounds", "windows", "least", "mean", "most"):
        table.add_column(heading, justify="left" if heading in ("side", "windows") else "right")
    for side in ("keys", "values"):
        parts = [layer[side] for layer in losses.values()]
        rounds = str(len(parts[0]["rounds"][0]))
        for windows, kind in (("trained on", "rounds"), ("held out", "held_out")):
            ends = [errors[-1] for part in parts for errors in part[kind]]
            table.add_row(side, rounds, windows, *(f"{x:.4f}" for x in (min(ends), statistics.fmean(ends), max(ends))))
    return table
