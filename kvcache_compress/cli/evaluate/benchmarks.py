"""A command of `kvcache-compress eval` for each benchmark, made from the benchmark's options."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvcache_compress.eval.caches.caches import full_cache
from kvcache_compress.eval.caches.peers import PEERS
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.runner.table import Cell, ResultTable, difference
from kvcache_compress.eval.tasks import make_benchmark
from kvcache_compress.eval.tasks.benchmark import Benchmark
from kvcache_compress.modeling.loading import SMOLLM2
from kvcache_compress.validation import LARGEST_SEED

_BOUNDS = {"ge": "min", "le": "max"}


def benchmark_command(benchmark: type[Benchmark]) -> Callable[..., None]:
    """Build a benchmark's command. It has an option for each field, and the options of `measure`.

    A field with several values becomes a repeatable option in the singular (`lengths`: `--length`). A field and an
    option of `measure` with the same name, such as `seed`, share one value.
    """
    common = dict(inspect.signature(measure, eval_str=True).parameters)
    del common["benchmark"]
    fields = sorted(benchmark.model_fields, key=lambda name: name in Benchmark.model_fields)

    def command(**values: Any) -> None:
        made = make_benchmark(benchmark.kind, {name: values[name] for name in fields})
        cells = measure(made, **{name: values[name] for name in common})
        show(cells)
        if any(cell.error is not None for cell in cells):
            raise typer.Exit(1)

    parameters = {name: _option(benchmark, name) for name in fields} | common
    command.__doc__ = (benchmark.__doc__ or "").partition("\n\n")[0]
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command


def _option(benchmark: type[Benchmark], name: str) -> inspect.Parameter:
    """A benchmark's field as a parameter from which typer makes an option."""
    field = benchmark.model_fields[name]
    kind: Any = get_type_hints(benchmark)[name]
    default: Any = inspect.Parameter.empty if field.is_required() else field.default
    names, description = [], field.description
    if get_origin(kind) in (list, tuple):
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        default = default if field.is_required() else list(default)
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
    cache: Annotated[
        list[str],
        typer.Option(help=f"Preset, YAML file or peer ({', '.join(PEERS)}); PRESET@sinks=0,recent=0. Repeatable."),
    ] = ["turboquant-4bit", "turboquant-2bit"],  # noqa: B006
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")] = SMOLLM2,
    codebooks: Annotated[
        Path | None,
        typer.Option(help="Codebooks of `kvcache-compress calibrate`, for CommVQ.", exists=True, dir_okay=False),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(help="Statistics of `kvcache-compress calibrate`, for spectral.", exists=True, dir_okay=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of results (.jsonl), a line per cache; a later run continues there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=LARGEST_SEED)] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of the model: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="Device; by default the accelerator if there is one.")] = None,
    fused: Annotated[bool, typer.Option("--fused", help="Attend over the codes instead of decoding them.")] = False,
) -> list[Cell]:
    """Run a benchmark for the full cache and those given by name.

    Raises:
        ValueError, ImportError, OSError: An argument is wrong, or what it names cannot be loaded.
    """
    ResultTable(output)  # a wrong file is reported before the model is loaded
    names = [name for name in dict.fromkeys(cache) if name != "full"]  # the full cache is always measured
    files = {"codebooks": codebooks, "statistics": statistics}
    specs = [full_cache(), *(resolve_cache(name, **files) for name in names)]
    runner = Runner(*load(model, dtype, device, fused=fused), output, seed=seed, on_progress=ProgressLine())
    return runner.run(benchmark.kind, benchmark, specs)


def show(cells: Sequence[Cell]) -> None:
    """Print a benchmark's table and skipped parts to stdout, and failed cells to stderr."""
    done = [cell for cell in cells if cell.error is None]
    if done:
        # Without a terminal the width is unknown, and 80 columns would squeeze the table.
        Console(width=None if sys.stdout.isatty() else 140).print(_terminal_table(done))
    for reason in cells[0].skipped if cells else ():
        typer.echo(f"skipped: {reason}")
    failed: dict[str, list[str]] = {}
    for cell in cells:
        if cell.error is not None:
            failed.setdefault(cell.error, []).append(cell.cache["name"])
    for error, names in failed.items():
        typer.echo(f"error: cache {', '.join(names)}: {error}", err=True)


def _terminal_table(cells: Sequence[Cell]) -> Table:
    head = cells[0]
    names = [name for name in head.scores if "." not in name][:6]
    title = f"{head.model}, {head.benchmark['name']}: {head.samples} samples"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("cache", overflow="fold")
    main = head.benchmark["main_score"]
    record = main if main in head.records[0] else "score"
    # A KL is a difference itself, and a score may be more than the mean of its records.
    compared = head.cache["lossless"] and head.benchmark["higher_is_better"]
    compared = compared and math.isclose(fmean(found[record] for found in head.records), head.scores[main])
    more = [f"{main} - full's"] if compared else []
    for heading in ("bits packed", "bits all", *names, *more, "packed tokens", "seconds"):
        table.add_column(heading, justify="right")
    for cell in cells:
        bits = f"{cell.packed_bits:.2f}", f"{cell.all_bits:.2f}"
        scores = [f"{cell.scores[name]:.4f}" for name in names]
        if compared:
            scores.append("" if cell is head else difference(cell, head, record, 3))
        table.add_row(cell.cache["name"], *bits, *scores, f"{cell.packed_tokens['least']:.0f}", f"{cell.seconds:.1f}")
    return table
