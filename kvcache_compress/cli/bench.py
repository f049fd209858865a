"""`kvcache-compress bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvcache_compress.validation import MOST_TOKENS

from .console import console, errors_as_lines, importing

if TYPE_CHECKING:
    from kvcache_compress.bench.decode import DecodeTime


def bench(
    model: Annotated[
        str,
        typer.Option(help="Model whose shape to time: llama-3.1-8b, qwen2.5-7b, smollm2-135m, a hub id or a folder."),
    ] = "llama-3.1-8b",
    preset: Annotated[list[str] | None, typer.Option(help="Preset or YAML file; repeatable.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Number of sequences; repeatable.", min=1, max=MOST_TOKENS)
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Packed tokens of each sequence; repeatable.", min=1, max=MOST_TOKENS)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of timed calls; the median counts.", min=1, max=10_000)] = 20,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Dtype of the model; by default bfloat16 on GPUs and float32 on CPUs."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file to write the figures to.", dir_okay=False)] = None,
) -> None:
    """Time attention over compressed caches on this machine, and PyTorch's attention over a full cache."""
    with importing():
        from kvcache_compress.bench.run import run_bench

    with errors_as_lines(), console.status("measuring ...") as status:
        rows, shape, bandwidth, title = run_bench(
            model, preset or [], batch or [], tokens or [], repeats=repeats, dtype=dtype, device=device, output=output,
            on_row=lambda row: status.update(escape(f"measuring ... {_named(row)} done")),
        )  # fmt: skip
    console.print(_table(rows, bandwidth, title))
    heads = f"{shape.query_heads} query heads, {shape.kv_heads} key/value heads of {shape.head_dim}"
    console.print(f"{heads}. A copy in this memory reads and writes {bandwidth:.1f} GB/s.")
    failed = [row for row in rows if row.error or row.invalid]
    for row in failed:
        why = row.error or f"the time does not count: {row.invalid}"
        console.print(escape(f"{_named(row)}: {why}"), style="red")
    if output is not None:
        console.print(f"written: {escape(str(output))}")
    if failed:
        raise typer.Exit(1)


def _named(row: DecodeTime) -> str:
    return f"{row.cache}, batch {row.batch} x {row.tokens} tokens"


def _table(rows: Sequence[DecodeTime], bandwidth: float, title: str) -> Table:
    """Table of the figures in 80 columns; `copy` is the bandwidth relative to that of a copy."""
    table = Table(title=escape(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("cache", "B x tokens", "bits", "ms", "GB/s", "copy", "speed-up", "bound"):
        table.add_column(heading, justify="left" if heading == "cache" else "right", overflow="fold")
    for row in rows:
        cells = ["-"] * 6
        if row.milliseconds is not None and row.gigabytes_per_second is not None:
            share = row.gigabytes_per_second / bandwidth
            cells = [f"{row.bits:.2f}", f"{row.milliseconds:.3f}", f"{row.gigabytes_per_second:.3g}", f"{share:.1%}"]
            cells += [f"{x:.2f}x" if x is not None else "-" for x in (row.speedup, row.bound)]
        table.add_row(escape(row.cache), f"{row.batch} x {row.tokens}", *cells)
    return table
