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
        name = "encoder" if "encoder" in parts[0] else "rounds"
        rounds = "encoder" if name == "encoder" else str(len(parts[0]["rounds"][0]))
        for windows, kind in (("trained on", name), ("held out", "held_out")):
            by_layer = [part[kind] for part in parts]
            ends = by_layer if name == "encoder" else [head[-1] for heads in by_layer for head in heads]
            table.add_row(side, rounds, windows, *(f"{x:.4f}" for x in (min(ends), statistics.fmean(ends), max(ends))))
    return table
