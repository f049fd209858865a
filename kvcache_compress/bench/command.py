"""`kvcache-compress bench`: decode attention on this machine for a model's shape, as a table, a file and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from ..cache import decoder_layers, head_dim_of, kv_heads_of
from ..config import load_config
from ..eval.drawing import require_matplotlib
from ..eval.results import circumstances, write_atomically
from .decode import DecodeTime, measure_decode
from .layers import SHAPES, Shape
from .plot import decode_plot
from .timing import copy_bandwidth

PRESETS = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "kivi-2bit", "qjl-3bit", "polarquant-rope-4bit")
LENGTHS = {"cuda": (8_192, 32_768, 131_072), "cpu": (1_024, 4_096, 16_384)}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def shape_of(model: str) -> Shape:
    """A shape by its name in `SHAPES`, or from the config of a hub id or a folder.

    Raises:
        ValueError: a model that cannot be compressed, or none of that name.
        OSError: nothing of that name.
    """
    if model in SHAPES:
        return SHAPES[model]
    config, _ = decoder_layers(AutoConfig.from_pretrained(model))
    return Shape(config.num_attention_heads, kv_heads_of(config), head_dim_of(config))


def run_bench(
    console: Console,
    model: str,
    presets: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    repeats: int = 20,
    dtype: str | None = None,
    device: str | None = None,
    output: Path | None = None,
    plot: Path | None = None,
) -> list[DecodeTime]:
    """Measures one layer's attention over the full cache and each preset's, and prints a table.

    Args:
        model: what `shape_of` takes.
        presets: names or YAML files; some of the presets when empty.
        batches, lengths: sequences, and packed tokens in each; those that suit the device when `lengths` is empty.
        repeats: calls of which the median is taken.
        dtype: of the model, `float32`, `bfloat16` or `float16`; the device's usual one when None.
        device: the GPU where there is one when None.
        output: JSON file for all figures and how they were measured.
        plot: PNG file for milliseconds against tokens.

    Raises:
        ValueError, OSError: an argument that cannot be; before anything is measured.
        ImportError: a plot is wanted and matplotlib is not installed.
    """
    shape = shape_of(model)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.split(":")[0] not in LENGTHS or (device != "cpu" and not torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: allowed 'cpu', and 'cuda' where there is a GPU")
    place = torch.device(device)
    dtype = dtype or DTYPES[place.type]
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r}: allowed float32, bfloat16, float16")
    for path in (output, plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if plot is not None:
        require_matplotlib()
    presets = list(dict.fromkeys(presets or PRESETS))
    for preset in presets:
        load_config(preset)

    bandwidth = copy_bandwidth(place)
    rows: list[DecodeTime] = []
    measured = measure_decode(
        presets, {model: shape}, batches, lengths or LENGTHS[place.type], place, repeats, getattr(torch, dtype)
    )
    with console.status("measuring the full cache ..."):
        for row in measured:
            rows.append(row)
    console.print(_table(rows, bandwidth, f"decode attention of one layer of {model} on {place}, {dtype}"))
    heads = f"{shape.query_heads} query heads, {shape.kv_heads} key/value heads of {shape.head_dim}"
    console.print(f"{heads}. A copy in this memory reads and writes {bandwidth:.1f} GB/s.")
    for row in rows:
        if row.error is not None:
            console.print(f"{row.cache}, batch {row.batch} x {row.tokens} tokens: {row.error}", style="red")
    if output is not None:
        found = {**circumstances(place), "dtype": dtype, "copy_gigabytes_per_second": round(bandwidth, 1)}
        found |= {"shape": asdict(shape), "repeats": repeats, "decode": [asdict(row) for row in rows]}
        write_atomically(output, json.dumps(found, indent=1) + "\n")
        console.print(f"written: {output}")
    if plot is not None:
        decode_plot(rows, f"one layer of {model} on {place}, {dtype}", plot)
        console.print(f"written: {plot}")
    return rows


def _table(rows: Sequence[DecodeTime], bandwidth: float, title: str) -> Table:
    table = Table(title=title)
    headings = ("cache", "batch", "tokens", "bits", "ms", "GB/s", "of a copy's", "speed-up", "bound")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=True)
    for row in rows:
        cells = ["-"] * 6
        if row.milliseconds is not None and row.gigabytes_per_second is not None:
            share = row.gigabytes_per_second / bandwidth
            cells = [f"{row.bits:.2f}", f"{row.milliseconds:.3f}", f"{row.gigabytes_per_second:.1f}", f"{share:.0%}"]
            cells += [f"{x:.2f}x" if x is not None else "-" for x in (row.speedup, row.bound)]
        table.add_row(row.cache, str(row.batch), str(row.tokens), *cells)
    return table
