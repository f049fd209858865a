"""The commands of `kvcache-compress eval`: one per benchmark, `compare` and `replay`."""

from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.runner import comparison as comparisons
from kvcache_compress.eval.runner import replay as replays
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.tasks import BENCHMARKS

from ..console import errors_as_lines
from .benchmarks import benchmark_command, show

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Benchmarks and studies of compressed caches.")


def compare(
    file: Annotated[Path, typer.Argument(help="YAML file with models, caches, benchmarks and output.")],
    output: Annotated[Path | None, typer.Option(help="File of results (.jsonl), instead of the file's.")] = None,
) -> None:
    """Compare caches on models and benchmarks; write a table of results."""
    comparison = comparisons.Comparison.read(file, output)
    try:
        cells, problems = comparisons.compare(comparison, ProgressLine())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    for benchmark in dict.fromkeys(cell.key[:2] for cell in cells):
        show([cell for cell in cells if cell.key[:2] == benchmark])
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems or any(cell.error is not None for cell in cells):
        raise typer.Exit(1)


def replay(
    file: Annotated[Path, typer.Argument(help="YAML file of a finished comparison.")],
    cache: Annotated[list[str] | None, typer.Option(help="Cache to measure again, by default all; repeatable.")] = None,
    benchmark: Annotated[list[str] | None, typer.Option(help="Benchmark, by default all; repeatable.")] = None,
    samples: Annotated[int, typer.Option(help="Samples of each benchmark (or of each of its texts).", min=1)] = 1,
) -> None:
    """Measure rows of a finished comparison again; fail unless their figures hold to within a tenth."""
    comparison = comparisons.Comparison.read(file)
    rows, problems = replays.replay(comparison, samples, cache or (), benchmark or (), ProgressLine())
    for row in rows:
        verdict = "holds" if row.holds else "changed"
        typer.echo(f"{row.model}, {row.benchmark}, {row.cache}: {row.stored:.4g}, now {row.now:.4g}: {verdict}")
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    if problems or not rows or not all(row.holds for row in rows):
        raise typer.Exit(1)


for _benchmark in BENCHMARKS:
    app.command(_benchmark.kind)(errors_as_lines()(benchmark_command(_benchmark)))
for _run in (compare, replay):
    app.command(_run.__name__)(errors_as_lines()(_run))
