"""The commands of `kvcache-compress eval`; also run by `python -m kvcache_compress.eval`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from kvcache_compress.eval.tasks import BENCHMARKS
from kvcache_compress.validation import shortened

from . import compare, fetch, report, studies
from .benchmarks import benchmark_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Benchmarks and studies of compressed caches.")


def _add_command(name: str, run: Callable[..., None]) -> None:
    """Register a command whose expected errors become one line on stderr and exit code 1."""

    @app.command(name)
    @functools.wraps(run)
    def command(**values: Any) -> None:
        try:
            run(**values)
        except (ValueError, ImportError, OSError) as error:
            typer.echo(f"error: {shortened(str(error))}", err=True)
            raise typer.Exit(1) from error


for _benchmark in BENCHMARKS:
    _add_command(_benchmark.kind, benchmark_command(_benchmark))
_add_command("probe", studies.probe)
_add_command("distortion", studies.distortion)
_add_command("neighbors", studies.neighbors)
_add_command("fetch", fetch.main)
_add_command("compare", compare.main)
_add_command("report", report.main)
