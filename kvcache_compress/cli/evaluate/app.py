"""The commands of `kvcache-compress eval`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from kvcache_compress.eval.tasks import BENCHMARKS

from ..console import errors_as_lines
from .benchmarks import benchmark_command
from .compare import compare
from .report import report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Benchmarks and studies of compressed caches.")


def _add_command(name: str, run: Callable[..., None]) -> None:
    @app.command(name)
    @functools.wraps(run)
    def command(**values: Any) -> None:
        with errors_as_lines():
            run(**values)


for _benchmark in BENCHMARKS:
    _add_command(_benchmark.kind, benchmark_command(_benchmark))
for _run in (compare, report):
    _add_command(_run.__name__, _run)
