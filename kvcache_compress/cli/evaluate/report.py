"""`kvcache-compress eval report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.reporting.report import write_report


def report(
    file: Annotated[Path, typer.Argument(help="Results of a comparison (.jsonl), finished or not.")],
) -> None:
    """Write a comparison's report: Markdown, plots, and one HTML file."""
    for path in write_report(file):
        typer.echo(path)
