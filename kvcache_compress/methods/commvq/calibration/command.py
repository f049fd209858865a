"""`kvcache-compress calibrate --method commvq`: `calibrate_commvq` with progress and a table of losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcache_compress.modeling.calibration.command import calibration

from .calibrate import CommVQSettings, calibrate_commvq


def run_calibration(
    console: Console, model: str, text: Sequence[str], output: Path, settings: CommVQSettings, device: str | None
) -> None:
    """Calibrate CommVQ and print progress, losses, time and memory.

    Raises:
        ValueError: as `calibration` and `calibrate_commvq`.
        OSError: a file cannot be written.
    """
    with calibration(console, model, text, output, device) as (loaded, tokenizer, report):
        losses = calibrate_commvq(loaded, tokenizer, text, output, settings, report=report, notice=console.print)
        console.print(_loss_table(losses))


def _loss_table(losses: dict[str, Any]) -> Table:
    """Table of mean squared errors of normalized vectors, on windows trained on and on held-out ones."""
    table = Table(title="mean squared error of normalized vectors, over layers and heads")
    for heading in ("side", "rounds", "windows", "least", "mean", "most"):
        table.add_column(heading, justify="left" if heading in ("side", "windows") else "right")
    for side in ("keys", "values"):
        parts = [layer[side] for layer in losses.values()]
        encoder = "encoder" in parts[0]
        counts = [] if encoder else [count for part in parts for count in part["of_heads"]]
        rounds = "encoder" if encoder else "-".join(str(n) for n in sorted({min(counts), max(counts)}))
        for windows, kind in (("trained on", "encoder" if encoder else "rounds"), ("held out", "held_out")):
            if encoder:
                ends = [part[kind] for part in parts]
            else:
                heads = [error for part in parts for error in part[kind]]
                ends = [error[count - 1] for error, count in zip(heads, counts, strict=True)]
            table.add_row(side, rounds, windows, *(f"{x:.4f}" for x in (min(ends), statistics.fmean(ends), max(ends))))
    return table
