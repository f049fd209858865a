"""Time decode attention on this machine for a model's shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvcache_compress.cache.estimate import model_shape
from kvcache_compress.config import load_config
from kvcache_compress.eval.provenance.results import circumstances, without_folders, write_atomically

from .decode import DecodeTime, measure_decode
from .layers import Shape
from .timing import copy_bandwidth

PRESETS = ("turboquant-4bit", "turboquant-3bit", "turboquant-2bit", "kivi-2bit", "qjl-3bit", "polarquant-rope-4bit")
LENGTHS = {"cuda": (8_192, 32_768, 131_072), "cpu": (1_024, 4_096, 16_384)}
DTYPES = {"cuda": ("bfloat16", "float16"), "cpu": ("float32", "bfloat16", "float16")}
"""Dtypes of a model by device, the default first; on a GPU PyTorch has no float32 flash attention to compare with."""


@dataclass(frozen=True)
class BenchResult:
    """Times by cache and length, the attention's shape, a copy's bandwidth in GB/s, and a title."""

    rows: list[DecodeTime]
    shape: Shape
    bandwidth: float
    title: str


def attention_shape(model: str) -> Shape:
    """Shape of a model's attention; same arguments and errors as `estimate.model_shape`."""
    return Shape(*model_shape(model)[1:])


def run_bench(
    model: str,
    presets: Sequence[str] = (),
    batches: Sequence[int] = (1,),
    lengths: Sequence[int] = (),
    *,
    repeats: int = 20,
    dtype: str | None = None,
    device: str | None = None,
    output: Path | None = None,
    on_row: Callable[[DecodeTime], None] = lambda row: None,
) -> BenchResult:
    """Measure one layer's attention over the full cache and over each preset's.

    Args:
        model: a model as for `attention_shape`.
        presets: names or YAML files; `PRESETS` if empty.
        batches, lengths: numbers of sequences, and of packed tokens in each; `LENGTHS` of the device if `lengths` is
            empty.
        repeats: timed calls; the result is their median.
        dtype: dtype of the model; the device's default if None.
        device: `cpu` or `cuda`; if None the GPU, if there is one.
        output: JSON file for all figures and how they were measured.
        on_row: called with each time as it is measured.

    Raises:
        ValueError, OSError: an argument is invalid; raised before anything is measured.
    """
    shape = attention_shape(model)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in LENGTHS or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={device!r}: must be 'cpu', or 'cuda' where there is a GPU")
    dtype = dtype or DTYPES[device][0]
    if dtype not in DTYPES[device]:
        raise ValueError(f"dtype={dtype!r} on {device}: must be one of {', '.join(DTYPES[device])}")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"output={str(output)!r}: there is no folder {str(output.parent)!r}")
    presets = list(dict.fromkeys(presets or PRESETS))
    for preset in presets:
        load_config(preset)
    batches, lengths = sorted({*batches}), sorted({*(lengths or LENGTHS[device])})

    place, name = torch.device(device), without_folders(model)
    rows: list[DecodeTime] = []
    bandwidth = copy_bandwidth(place)
    for row in measure_decode(presets, {name: shape}, batches, lengths, place, repeats, getattr(torch, dtype)):
        rows.append(replace(row, cache=Path(row.cache).name))
        on_row(rows[-1])
    if output is not None:
        contents = {**circumstances(place), "dtype": dtype, "copy_gigabytes_per_second": round(bandwidth, 1)}
        contents |= {"heads": asdict(shape), "repeats": repeats, "decode": [asdict(row) for row in rows]}
        write_atomically(output, json.dumps(contents, indent=1) + "\n")
    return BenchResult(rows, shape, bandwidth, f"decode attention of one layer of {name} on {device}, {dtype}")
