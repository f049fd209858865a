"""Time decode attention on this machine for a model's shape."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kvcache_compress.cache.estimate import model_shape
from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import circumstances, without_folders, write_atomically
from kvcache_compress.validation import usable_device

from .decode import DecodeTime, measure_decode
from .layers import Shape
from .timing import copy_bandwidth

PRESETS = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "kivi-2bit", "qjl-3bit", "polarquant-rope-4bit")
ON_GPU: dict[str, Any] = {"lengths": (8_192, 32_768, 131_072), "dtype": "bfloat16"}
ON_CPU: dict[str, Any] = {"lengths": (1_024, 4_096, 16_384), "dtype": "float32"}


def run_bench(
    model: str,
    presets: Sequence[str],
    batches: Sequence[int],
    lengths: Sequence[int],
    *,
    repeats: int,
    dtype: str | None,
    device: str | None,
    output: Path | None,
    on_row: Callable[[DecodeTime], None],
) -> tuple[list[DecodeTime], Shape, float, str]:
    """Measure one layer's attention over the full cache and over each preset's.

    The arguments are the options of `kvcache-compress bench`; `on_row` is called with each time as it is measured.
    Returns all times, the attention's shape, a copy's bandwidth in GB/s, and a title.
    """
    shape = Shape(*model_shape(model)[1:])
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'cpu' or 'cuda'")
    defaults = ON_GPU if place.type == "cuda" else ON_CPU
    dtype = dtype or defaults["dtype"]
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"output={str(output)!r}: there is no folder {str(output.parent)!r}")
    presets = list(dict.fromkeys(presets or PRESETS))
    for preset in presets:
        load_config(preset)
    batches, lengths = sorted({*(batches or (1,))}), sorted({*(lengths or defaults["lengths"])})

    name = without_folders(model)
    rows: list[DecodeTime] = []
    bandwidth = copy_bandwidth(place)
    for row in measure_decode(presets, name, shape, batches, lengths, place, repeats, getattr(torch, dtype)):
        rows.append(replace(row, cache=Path(row.cache).name))
        on_row(rows[-1])
    if output is not None:
        contents = {**circumstances(place), "dtype": dtype, "copy_gigabytes_per_second": round(bandwidth, 1)}
        contents |= {"heads": shape._asdict(), "repeats": repeats, "decode": [asdict(row) for row in rows]}
        write_atomically(output, json.dumps(contents, indent=1) + "\n")
    return rows, shape, bandwidth, f"decode attention of one layer of {name} on {place}, {dtype}"
