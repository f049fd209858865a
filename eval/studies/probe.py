"""Probe of layers: the loss when one side (keys or values) of one layer is compressed alone.

The windows of a text are read as for perplexity: a prefix is prefilled once, each cache is filled from it, and the
continuation is fed in passes of a few tokens. Reported for each full-attention layer and side: the KL divergence of the
next-token distribution from the full cache's, the error of the packed vectors, and the error of that layer's attention
output, whose input is the full cache's.

    kvcache-compress eval probe --cache turboquant-2bit --text TEXT.txt --windows 2 --output probe
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvcache_compress.codecs.base import SIDES
from kvcache_compress.config import load_config
from kvcache_compress.eval.caches.prefill import STEP_TOKENS
from kvcache_compress.eval.provenance.artifacts import save_figure, write_json
from kvcache_compress.eval.reporting.answer import MAX_KL
from kvcache_compress.eval.reporting.drawing import COLORS, new_figure, require_matplotlib
from kvcache_compress.eval.runner.command import (
    DEFAULT_MODEL,
    CodebooksOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    StatisticsOption,
    load,
)
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity

from .probe_layers import Probe, probe_layers


def terminal_table(probe: Probe, title: str) -> Table:
    """Table with a line per side of a layer, the most harmful first."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "layer",
        "side",
        "method",
        "bits",
        "KL",
        "same top-1",
        "rel. MSE",
        "attention error",
        "packed tokens",
    ):
        table.add_column(heading, justify="left" if heading in ("side", "method") else "right", no_wrap=True)
    for row in probe.rows:
        spread = "" if row.kl_stderr is None else f" ± {row.kl_stderr:.6f}"
        errors = ["-" if error is None else f"{error:.4f}" for error in (row.relative_mse, row.attention_error)]
        cells = [f"{row.stored_bits:.2f}", f"{row.kl:.6f}{spread}", f"{row.top1:.3f}", *errors]
        table.add_row(str(row.layer), row.side, row.method, *cells, f"{row.packed_tokens:.0f}")
    return table


def plot_probe(probe: Probe, title: str, path: Path) -> None:
    """Plot bars per layer, keys beside values: KL, and the error of the layer's attention output."""
    layers = sorted({row.layer for row in probe.rows})
    width = max(7.0, 0.34 * len(layers) + 1.5)
    figure, _ = new_figure(width, 6.4, axes=False)
    panels = figure.subplots(2, 1, sharex=True)
    for side, color, shift in zip(SIDES, COLORS, (-0.21, 0.21), strict=False):
        of_side = [row for row in probe.rows if row.side == side]
        if not of_side:
            continue
        places = [layers.index(row.layer) + shift for row in of_side]
        spread = [row.kl_stderr or 0.0 for row in of_side]
        panels[0].bar(places, [row.kl for row in of_side], 0.4, yerr=spread, label=side, color=color, ecolor="#555555")
        errors = [math.nan if row.attention_error is None else row.attention_error for row in of_side]
        panels[1].bar(places, errors, 0.4, color=color)
    panels[0].set(ylabel="KL from the full cache, nats", title=title)
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    panels[1].set(ylabel="relative error of the attention output", xlabel="layer, one side compressed alone")
    panels[1].set_xlim(-0.6, len(layers) - 0.4)
    panels[1].set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
    for panel in panels:
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    save_figure(figure, path)


def advice(probe: Probe) -> str:
    """The rules, if the cache that they leave loses no more than a recommended one may."""
    if probe.ruled.kl <= MAX_KL:
        return probe.rules
    return f"no rules are recommended: above a KL of {MAX_KL:g} also without these; raise --worst, or take more bits"


def main(
    cache: Annotated[str, typer.Option(help="Preset or YAML file.")] = "turboquant-2bit",
    model: ModelOption = DEFAULT_MODEL,
    text: Annotated[Path, typer.Option(help="Text file, or folder of .txt files.")] = DEFAULT_TEXT,
    windows: Annotated[int, typer.Option(help="Windows of prefix + scored tokens.")] = 2,
    prefix: Annotated[int, typer.Option(help="Tokens to prefill.")] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens to score after them.")] = 256,
    step: Annotated[int, typer.Option(help="Scored tokens per forward pass; 1 is as in generation.")] = STEP_TOKENS,
    sink_tokens: Annotated[int | None, typer.Option(min=0, help="Sink tokens, instead of the preset's.")] = None,
    recent_tokens: Annotated[int | None, typer.Option(min=0, help="Recent tokens, instead of the preset's.")] = None,
    worst: Annotated[int, typer.Option(help="Sides of layers that the rules leave uncompressed.")] = 4,
    codebooks: CodebooksOption = None,
    statistics: StatisticsOption = None,
    output: Annotated[Path | None, typer.Option(help="Folder for probe.json and probe.png.", file_okay=False)] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Find the layers and sides (keys or values) whose compression alone hurts the model's output most."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        require_matplotlib()  # a missing matplotlib shows before the work, not after it
    windows_of_cache = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    config = load_config(cache).changed(**{name: n for name, n in windows_of_cache.items() if n is not None})
    config = config.with_files(codebooks=codebooks, statistics=statistics)
    sizes = {"prefix": prefix, "scored": scored, "windows": windows, "step": step}
    benchmark = Perplexity(texts=(text,), **sizes)
    loaded, tokenizer = load(model, dtype, device)
    probe = probe_layers(loaded, tokenizer, config, benchmark, worst=worst, on_progress=ProgressLine())
    name = Path(loaded.name_or_path or type(loaded).__name__).name
    title = f"{cache}: {name}, {'/'.join(text.resolve().parts[-2:])}, {windows} x ({prefix} + {scored}) tokens"
    if output is not None:
        about = {"model": name, "dtype": dtype, "cache": cache, "config": config.model_dump(mode="json"), **sizes}
        write_json(output / "probe.json", {**about, **asdict(probe)}, loaded.device, "matplotlib")
        plot_probe(probe, title, output / "probe.png")
    Console(width=140).print(terminal_table(probe, title))
    for what, why in probe.skipped.items():
        typer.echo(f"{what}: {why}")
    for label, harm in {"all sides": probe.whole, f"without the worst {worst}": probe.ruled}.items():
        typer.echo(
            f"{label}: KL {harm.kl:.5f}, {harm.all_bits:.2f} bits per number over the whole cache, dense tokens as 16"
        )
    typer.echo(advice(probe))
