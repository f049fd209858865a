"""Commands generated from the options of benchmarks, and the options that all commands share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
import typer
from rich import box
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
from kvcache_compress.eval.tasks.benchmark import Benchmark, make_benchmark
from kvcache_compress.modeling.loading import SMOLLM2, load_model
from kvcache_compress.validation import LARGEST_SEED

DTYPES = ("float32", "bfloat16", "float16")
_BOUNDS = {"ge": "min", "le": "max"}
DEFAULT_CACHES = ["turboquant-4bit", "turboquant-2bit"]
DEFAULT_MODEL = SMOLLM2

ModelOption = Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")]
CacheOption = Annotated[
    list[str],
    typer.Option(help=f"Preset, YAML file or peer ({', '.join(PEERS)}); PRESET@sinks=0,recent=0. Repeatable."),
]
CodebooksOption = Annotated[
    Path | None,
    typer.Option(help="Codebooks of `kvcache-compress calibrate`, for CommVQ.", exists=True, dir_okay=False),
]
StatisticsOption = Annotated[
    Path | None,
    typer.Option(help="Statistics of `kvcache-compress calibrate`, for spectral.", exists=True, dir_okay=False),
]
OutputOption = Annotated[
    Path | None, typer.Option(help="Folder for a JSON file per cache; a later run continues there.", file_okay=False)
]
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=LARGEST_SEED)]
DtypeOption = Annotated[str, typer.Option(help="Type of the model: float32, bfloat16 or float16.")]
DeviceOption = Annotated[str | None, typer.Option(help="Device of the model; the accelerator where there is one.")]
FusedOption = Annotated[bool, typer.Option("--fused", help="Attend over the codes instead of decoding them.")]


def benchmark_command(benchmark: type[Benchmark]) -> Callable[..., None]:
    """Build a benchmark's command: an option per field, with its description, and the options of `measure`.

    A field of several values becomes a repeatable option in the singular (`lengths`: `--length`). A field that is an
    option of `measure` too, such as `seed`, gets the same value.
    """
    common = dict(inspect.signature(measure, eval_str=True).parameters)
    del common["benchmark"]
    fields = sorted(benchmark.model_fields, key=lambda name: name in Benchmark.model_fields)

    def command(**values: Any) -> None:
        made = make_benchmark(benchmark.kind, {name: values[name] for name in fields})
        measure(made, **{name: values[name] for name in common})

    parameters = {name: _option(benchmark, name) for name in fields} | common
    command.__doc__ = (benchmark.__doc__ or "").partition("\n\n")[0]
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command


def _option(benchmark: type[Benchmark], name: str) -> inspect.Parameter:
    """The option of a benchmark's field, as typer reads it from a function's signature."""
    field = benchmark.model_fields[name]
    kind: Any = get_type_hints(benchmark)[name]
    default: Any = inspect.Parameter.empty if field.is_required() else field.default
    names, description = [], field.description
    if get_origin(kind) in (list, tuple):
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
        names, description = [f"--{name.removesuffix('s').replace('_', '-')}"], f"{description} Repeatable."
    bounds: dict[str, Any] = {
        bound: getattr(limit, key) for limit in field.metadata for key, bound in _BOUNDS.items() if hasattr(limit, key)
    }
    option = typer.Option(*names, help=description, **bounds)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])


def measure(
    benchmark: Benchmark,
    *,
    cache: CacheOption = DEFAULT_CACHES,
    model: ModelOption = DEFAULT_MODEL,
    codebooks: CodebooksOption = None,
    statistics: StatisticsOption = None,
    output: OutputOption = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    fused: FusedOption = False,
) -> None:
    """Run a benchmark for caches given by name and the full one, and print its table.

    Args:
        benchmark: what to run.
        cache: anything that `resolve_cache` takes.
        model: anything that `load_model` takes.
        codebooks, statistics: files for caches that were calibrated, CommVQ and spectral.
        output: folder for the cells; None keeps none.
        seed: set before each sample.
        dtype: of the model.
        device: of the model.
        fused: attend over the codes instead of decoding them.

    Raises:
        ValueError, ImportError, OSError: an argument is wrong, or what it names cannot be loaded.
        typer.Exit: a cell failed.
    """
    names = [name for name in dict.fromkeys(cache) if name != "full"]  # the full cache is always measured
    files = {"codebooks": codebooks, "statistics": statistics}
    specs = [full_cache(), *(resolve_cache(name, **files) for name in names)]
    loaded, tokenizer = load(model, dtype, device, fused=fused)
    runner = Runner(loaded, tokenizer, output, seed=seed, on_progress=ProgressLine())
    cells = runner.run(benchmark.kind, benchmark, specs)
    show(cells)
    if any(cell.error is not None for cell in cells):
        raise typer.Exit(1)


def load(
    model: str, dtype: str, device: str | None, *, fused: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer onto a device, the accelerator by default.

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
    """Print one benchmark's table and skipped parts to stdout, failed cells to stderr."""
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
    """A line per cache: measured bits, scores, least number of packed tokens, seconds."""
    head = cells[0]
    names = [name for name in head.scores if "." not in name][:6]
    title = f"{head.model}, {head.benchmark['name']}: {head.samples} samples"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
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
