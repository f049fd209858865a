"""`kvcache-compress eval fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcache_compress.eval.runner.fetch import fetch_data, make_files


def fetch(
    output: Annotated[
        Path, typer.Option(help="Folder to fill: a checkout of the repository.", file_okay=False)
    ] = Path(),
    folders: Annotated[
        list[Path] | None, typer.Option("--from", help="Folder with the files, tried before any host; repeatable.")
    ] = None,
    make: Annotated[
        bool, typer.Option("--make", help="Also make codebooks and statistics, which takes minutes.")
    ] = False,
) -> None:
    """Download (or copy with `--from`) the public data used by the committed comparisons, and build files from it."""
    complete = True
    for found in (*fetch_data(output, folders or []), *make_files(output, slow=make)):
        typer.echo(f"{found.state:8} {found.name}{found.about and f': {found.about}'}")
        complete &= found.state != "missing"
    if not complete:
        raise typer.Exit(1)
