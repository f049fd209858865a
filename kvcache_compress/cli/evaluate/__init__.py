"""`kvcache-compress eval`: a file per command."""

from typing import Any

import typer

from ..console import importing

HELP = "Measure the quality loss of compressed caches; each command has its own --help."
PASSED_ON: dict[Any, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that passes all its arguments on, so that the import of PyTorch waits until it is called."""


def evaluate(context: typer.Context) -> None:
    with importing():
        from .app import app

    app(args=context.args, prog_name="kvcache-compress eval")
