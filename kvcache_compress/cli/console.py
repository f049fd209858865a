"""Helpers of all commands: the console, a notice while libraries load, and errors printed as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.status import Status

from kvcache_compress.validation import shortened

console = Console()
COMPARED = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "commvq-2bit")
"""Presets that are listed beside those by budget."""


def importing() -> Status:
    """A line on the terminal while PyTorch and Transformers are imported, which takes seconds."""
    return Console(stderr=True).status("Importing PyTorch and Transformers ...")


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print an error of the library as one line, and end the command with status 1."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        fail(str(error))


def fail(problem: str) -> None:
    typer.secho(f"error: {shortened(problem)}", fg="red", err=True)
    raise typer.Exit(1) from None
