"""`kvcache-compress eval compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.reporting.report import write_report
from kvcache_compress.eval.runner import comparison as comparisons
from kvcache_compress.eval.runner.comparison import Comparison
from kvcache_compress.eval.runner.processes import LaunchedProcesses
from kvcache_compress.eval.runner.progress import ProgressLine

from .benchmarks import show


def compare(
    file: Annotated[Path, typer.Argument(help="YAML file with models, caches, benchmarks and output.")],
    output: Annotated[Path | None, typer.Option(help="File of results (.jsonl), instead of the file's.")] = None,
) -> None:
    """Compare caches on models and benchmarks; write a table of results and its report."""
    processes = LaunchedProcesses()
    main_process = processes.index == 0
    try:
        comparison = Comparison.read(file)
        if output is not None:
            comparison = comparison.model_copy(update={"output": output})
        try:
            cells, problems = comparisons.compare(comparison, processes, ProgressLine() if main_process else None)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    finally:
        processes.close()
    if main_process:
        for benchmark in dict.fromkeys(cell.key[:2] for cell in cells):
            show([cell for cell in cells if cell.key[:2] == benchmark])
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
        if cells:
            write_report(comparison.output)
            typer.echo(f"report: {comparison.output.with_suffix('.html')}")
    if problems or any(cell.error is not None for cell in cells):
        raise typer.Exit(1)
