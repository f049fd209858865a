"""`kvcache-compress eval probe`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvcache_compress.eval.caches.resolve import resolve_config
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity
from kvcache_compress.eval.tuning.probe import Probe, probe_layers
from kvcache_compress.modeling.loading import SMOLLM2

from .options import CodebooksOption, DeviceOption, DtypeOption, ModelOption, StatisticsOption

_OF_PERPLEXITY = Perplexity.model_fields


def _field(name: str) -> Any:
    """An option with the description of the same option of `eval perplexity`."""
    return typer.Option(help=_OF_PERPLEXITY[name].description, min=1)


def probe(
    cache: Annotated[str, typer.Option(help="Preset or YAML file; PRESET@sinks=0,recent=0.")] = "turboquant-2bit",
    model: ModelOption = SMOLLM2,
    text: Annotated[Path, typer.Option(help="Text file, or folder of .txt files.")] = DEFAULT_TEXT,
    windows: Annotated[int, _field("windows")] = 2,
    prefix: Annotated[int, _field("prefix")] = _OF_PERPLEXITY["prefix"].default,
    scored: Annotated[int, _field("scored")] = _OF_PERPLEXITY["scored"].default,
    step: Annotated[int, _field("step")] = _OF_PERPLEXITY["step"].default,
    worst: Annotated[int, typer.Option(help="Sides of layers that the suggested rules leave dense.")] = 4,
    codebooks: CodebooksOption = None,
    statistics: StatisticsOption = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.", dir_okay=False)] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Find the layers and sides (keys or values) whose compression alone hurts the model's output most."""
    config = resolve_config(cache, codebooks=codebooks, statistics=statistics)
    sizes = {"prefix": prefix, "scored": scored, "windows": windows, "step": step}
    benchmark = Perplexity(texts=(text,), **sizes)
    loaded, tokenizer = load(model, dtype, device)
    found = probe_layers(loaded, tokenizer, config, benchmark, worst=worst, on_progress=ProgressLine())
    name = Path(loaded.name_or_path or type(loaded).__name__).name
    title = f"{cache}: {name}, {'/'.join(text.resolve().parts[-2:])}, {windows} x ({prefix} + {scored}) tokens"
    if output is not None:
        about = {"model": name, "dtype": dtype, "cache": cache, "config": config.model_dump(mode="json"), **sizes}
        write_json(output, about | asdict(found), loaded.device)
    Console(width=140).print(_table(found, title))
    for what, why in found.skipped.items():
        typer.echo(f"{what}: {why}")
    for label, loss in {"all sides": found.whole, f"without the worst {worst}": found.ruled}.items():
        typer.echo(f"{label}: KL {loss.kl:.5f}, {loss.all_bits:.2f} bits per number over the whole cache")
    typer.echo(found.advice)


def _table(found: Probe, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "side", "method"):
        table.add_column(heading)
    for heading in ("bits", "KL", "same top-1", "packed tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        loss = row.loss
        spread = "" if loss.kl_stderr is None else f" ± {loss.kl_stderr:.6f}"
        figures = f"{row.bits:.2f}", f"{loss.kl:.6f}{spread}", f"{loss.top1:.3f}", f"{loss.packed_tokens:.0f}"
        table.add_row(str(row.layer), row.side, row.method, *figures)
    return table
