"""`kvcache-compress bench`: time decode attention on this machine for a model's shape; table, file and plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcache_compress.cache.estimate import model_shape
from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import circumstances, without_folders, write_atomically
from kvcache_compress.eval.reporting.drawing import require_matplotlib

from .decode import DecodeTime, measure_decode
from .layers import Shape
from .plot import decode_plot
from .timing import copy_bandwidth

PRESETS = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "kivi-2bit", "qjl-3bit", "polarquant-rope-4bit")
LENGTHS = {"cuda": (8_192, 32_768, 131_072), "cpu": (1_024, 4_096, 16_384)}
DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32", "bfloat16", "float16")}
"""Dtypes of a model by device, the default first; on a GPU PyTorch has no float32 flash attention to compare with."""


def attention_shape(model: str) -> Shape:
    """Shape of a model's attention; takes and raises the same as `estimate.model_shape`."""
    return Shape(*model_shape(model)[1:])


def run_bench(
    console: Console,
    model: str,
    presets: Sequence[str] = (),
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] = (),
    *,
    repeats: int = 20,
    dtype: str | None = None,
    device: str | None = None,
    output: Path | None = None,
    plot: Path | None = None,
) -> list[DecodeTime]:
    """Measure one layer's attention over the full cache and over each preset's, and print a table.

    Args:
        model: a model as for `attention_shape`.
        presets: names or YAML files; `PRESETS` if empty.
        batches, lengths: numbers of sequences, and of packed tokens in each; `LENGTHS` of the device if `lengths` is
            empty.
        repeats: calls of which the median is taken.
        dtype: dtype of the model; the device's default if None.
        device: `cpu` or `cuda`; if None the GPU, if there is one.
        output: JSON file for all figures and how they were measured.
        plot: PNG file for a plot of milliseconds against tokens.

    Raises:
        ValueError, OSError: an argument is invalid; raised before anything is measured.
        ImportError: a plot is wanted and matplotlib is not installed.
    """
    shape = attention_shape(model)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in LENGTHS or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: allowed 'cpu', and 'cuda' where there is a GPU")
    dtype = dtype or DTYPES[device][0]
    if dtype not in DTYPES[device]:
        raise ValueError(f"dtype={dtype!r} on {device}: allowed {', '.join(DTYPES[device])}")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"plot={plot}: allowed are names that end in .png")
    for path in (output, plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if plot is not None:
        require_matplotlib()
    presets = list(dict.fromkeys(presets or PRESETS))
    for preset in presets:
        load_config(preset)
    batches, lengths = sorted({*batches}), sorted({*(lengths or LENGTHS[device])})

    place, name = torch.device(device), without_folders(model)
    rows: list[DecodeTime] = []
    with console.status("measuring ...") as status:
        bandwidth = copy_bandwidth(place)
        measured = measure_decode(presets, {name: shape}, batches, lengths, place, repeats, getattr(torch, dtype))
        for row in measured:
            rows.append(replace(row, cache=Path(row.cache).name))
            status.update(escape(f"measuring ... {rows[-1].cache}, batch {row.batch} x {row.tokens} tokens done"))
    title = f"decode attention of one layer of {name} on {device}, {dtype}"
    console.print(_table(rows, bandwidth, title))
    heads = f"{shape.query_heads} query heads, {shape.kv_heads} key/value heads of {shape.head_dim}"
    console.print(f"{heads}. A copy in this memory reads and writes {bandwidth:.1f} GB/s.")
    for row in rows:
        if row.error is not None or row.invalid is not None:
            why = row.error or f"the time does not count: {row.invalid}"
            text = f"{row.cache}, batch {row.batch} x {row.tokens} tokens: {why}"
            console.print(escape(text), style="red")
    if output is not None:
        contents = {**circumstances(place), "dtype": dtype, "copy_gigabytes_per_second": round(bandwidth, 1)}
        contents |= {"heads": asdict(shape), "repeats": repeats, "decode": [asdict(row) for row in rows]}
        write_atomically(output, json.dumps(contents, indent=1) + "\n")
        console.print(f"written: {escape(str(output))}")
    if plot is not None and any(row.milliseconds is not None for row in rows):
        decode_plot(rows, title, plot)
        console.print(f"written: {escape(str(plot))}")
    return rows


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
