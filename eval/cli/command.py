"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress import enable_fused_attention
from kvcache_compress.eval.caches.caches import full_cache
from kvcache_compress.eval.caches.peers import PEERS
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.runner.cells import Cell
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import make_benchmark
from kvcache_compress.modeling.loading import SMOLLM2, load_model
from kvcache_compress.validation.messages import shortened
from kvcache_compress.validation.options import LARGEST_SEED

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_CACHES = ["turboquant-4bit", "turboquant-2bit"]

ModelOption = Annotated[str, typer.Option(help="model: smollm2-135m, a hub id or a folder")]
CacheOption = Annotated[
    list[str],
    typer.Option(help=f"preset, YAML file or peer ({', '.join(PEERS)}), PRESET@sinks=0,recent=0; repeatable"),
]
CodebooksOption = Annotated[
    Path | None, typer.Option(help="file of `kvcache-compress calibrate`, for CommVQ", exists=True, dir_okay=False)
]
OutputOption = Annotated[
    Path | None, typer.Option(help="folder for a JSON file per cache; a later run goes on there", file_okay=False)
]
LimitOption = Annotated[int | None, typer.Option(help="samples at most", min=1)]
SeedOption = Annotated[int, typer.Option(help="set before each sample", min=0, max=LARGEST_SEED)]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
DeviceOption = Annotated[str | None, typer.Option(help="device of the model; the accelerator where there is one")]
FusedOption = Annotated[bool, typer.Option("--fused", help="attend over the codes instead of decoding them")]

DEFAULT_MODEL = SMOLLM2


def measure(
    kind: str,
    options: Mapping[str, Any],
    *,
    model: str,
    cache: Sequence[str],
    codebooks: Path | None = None,
    output: Path | None = None,
    seed: int = 0,
    dtype: str = "float32",
    device: str | None = None,
    fused: bool = False,
) -> None:
    """Run a benchmark for caches given by name, the full one included, and print its table; the body of a command.

    Args:
        kind: the benchmark, with its `options`; see `make_benchmark`.
        model: anything that `load_model` takes; `dtype` and `device` say how and where.
        cache: anything that `resolve_cache` takes; `codebooks` is for those with learned ones.
        output: folder for the cells; None keeps none.
        seed: set before each sample.
        fused: attend over the codes instead of decoding them.

    Raises:
        typer.Exit: something was wrong with the arguments, or a cell failed; said on stderr.
    """
    try:
        benchmark = make_benchmark(kind, options)
        names = [name for name in dict.fromkeys(cache) if name != "full"]  # the full cache is always there
        specs = [full_cache(), *(resolve_cache(name, codebooks=codebooks) for name in names)]
        loaded, tokenizer = load(model, dtype, device, fused=fused)
        runner = Runner(loaded, tokenizer, output, seed=seed, on_progress=ProgressLine())
        cells = runner.run(kind, benchmark, specs)
    except (ValueError, ImportError, OSError) as error:
        raise failure(str(error)) from error
    show(cells)
    if any(cell.error is not None for cell in cells):
        raise typer.Exit(1)


def failure(message: str) -> typer.Exit:
    """Says on stderr what is wrong; to be raised."""
    typer.echo(f"error: {shortened(message)}", err=True)
    return typer.Exit(1)


def load(
    model: str, dtype: str, device: str | None, *, fused: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, where it shall run.

    Raises:
        ValueError: no such dtype or model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: allowed {', '.join(DTYPES)}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    loaded, tokenizer = load_model(model, dtype=getattr(torch, dtype), device=device or accelerator)
    if fused:
        enable_fused_attention(loaded)
    return loaded, tokenizer


def show(cells: Sequence[Cell]) -> None:
    """The table of one benchmark and what it skipped on stdout, failed cells on stderr."""
    done = [cell for cell in cells if cell.error is None]
    if done:
        # Where the output is no terminal, its width is unknown: the columns should not be squeezed into the usual 80.
        Console(width=None if sys.stdout.isatty() else 140).print(terminal_table(done))
    for reason in cells[0].skipped if cells else ():
        typer.echo(f"skipped: {reason}")
    failed: dict[str, list[str]] = {}
    for cell in cells:
        if cell.error is not None:
            failed.setdefault(cell.error, []).append(cell.cache["name"])
    for error, names in failed.items():
        typer.echo(f"error: cache {', '.join(names)}: {error}", err=True)


def terminal_table(cells: Sequence[Cell]) -> Table:
    """A line per cache: measured bits, the benchmark's scores, tokens packed at least, seconds."""
    head = cells[0]
    names = [name for name in head.scores if "." not in name][:6]
    table = Table(title=f"{head.model}, {head.benchmark['name']}: {head.samples} samples")
    table.add_column("cache", overflow="fold")
    for heading in ("bits packed", "bits all", *names, "packed tokens", "seconds"):
        table.add_column(heading, justify="right")
    for cell in cells:
        scores = [f"{cell.scores[name]:.4f}" for name in names]
        table.add_row(
            cell.cache["name"],
            f"{cell.packed_bits:.2f}",
            f"{cell.all_bits:.2f}",
            *scores,
            f"{cell.packed_tokens['least']:.0f}",
            f"{cell.seconds:.1f}",
        )
    return table
