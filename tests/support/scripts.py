"""Scripts of `benchmarks/` run in this process: a process of its own imports PyTorch and Transformers anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from click.testing import Result
from typer.testing import CliRunner


def run_script(main: Callable[..., Any], *words: str) -> Result:
    """Run a script's `main` with these arguments, as `python SCRIPT.py ...` would."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words])
