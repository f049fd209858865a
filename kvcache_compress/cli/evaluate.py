"""`kvcache-compress eval`, whose commands are in `kvcache_compress.eval`."""

from __future__ import annotations

from typing import Any

import typer

from .console import importing

HELP = "Measure the quality loss of compressed caches; each command has its own --help."
PASSED_ON: dict[Any, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that hands all its arguments on."""


def evaluate(context: typer.Context) -> None:
    with importing():
        from kvcache_compress.eval.cli.app import app as evaluations

    evaluations(args=context.args, prog_name="kvcache-compress eval")
