"""Time decode attention of one layer: one token's queries over a long compressed cache, and over a dense one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcache_compress.attention.handle import Step
from kvcache_compress.codecs.backend import BackendChoice, interpreting, resolve_backend
from kvcache_compress.eval.provenance.results import error_message
from kvcache_compress.storage.segments import SideSegments

from .compare import LIBRARY_BAR, compare, compare_view
from .layers import Shape, encoded_side, middle_layer, named_config
from .peers import PEERS, installed
from .timing import median_ms

BACKENDS = {"cuda": [SDPBackend.FLASH_ATTENTION], "cpu": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}
"""Allowed backends of PyTorch's attention: on a GPU only flash attention is timed."""


@dataclass(frozen=True)
class DecodeTime:
    """Time of decode attention with one cache, shape, batch and length.

    Attributes:
        cache: preset; or, over uncompressed keys and values, `full` for PyTorch's attention, or another library's name.
        shape: name of the model's shape.
        milliseconds: median time of one layer and step.
        gigabytes_per_second: stored bytes of the layer, divided by that time.
        bits: stored bits per number, everything in the layer counted; 16 or 32 for uncompressed caches.
        speedup: speed-up over `full` at the same batch and length.
        bound: speed-up that the number of bytes would allow.
        attention_error: relative error of some rows, compared before the timing (`compare.py`).
        error: why there are no figures.
    """

    cache: str
    shape: str
    batch: int
    tokens: int
    milliseconds: float | None = None
    gigabytes_per_second: float | None = None
    bits: float | None = None
    speedup: float | None = None
    bound: float | None = None
    attention_error: float | None = None
    error: str | None = None


def full_time(
    library: str,
    name: str,
    shape: Shape,
    batch: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> DecodeTime:
    """Time a library's attention with grouped queries over uncompressed keys and values.

    `full` is PyTorch's, flash attention if available; other names are those of `PEERS`.

    Raises:
        ValueError: the attention is wrong.
    """
    query = torch.randn(batch, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    size = (batch, tokens, shape.kv_heads, shape.head_dim)
    if library == "full":
        size = (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    attend = (_torch if library == "full" else PEERS[library])(query, keys, values)
    # Other libraries use the layout `[B, T, H, D]`.
    by_head = (keys, values) if library == "full" else (keys.transpose(1, 2), values.transpose(1, 2))
    with sdpa_kernel(BACKENDS[device.type]):
        error = compare(
            attend, query, lambda rows: (by_head[0][rows].float(), by_head[1][rows].float()), shape.head_dim**-0.5,
            LIBRARY_BAR,
        )  # fmt: skip
        time = median_ms(attend, device, repeats)
    bits = 8.0 * dtype.itemsize
    stored = keys.nbytes + values.nbytes
    return DecodeTime(library, name, batch, tokens, time, stored / time / 1e6, bits, attention_error=error)


def _torch(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def compressed_time(
    preset: str,
    name: str,
    shape: Shape,
    batch: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> DecodeTime:
    """Time fused attention as a model calls it, over `tokens` random packed tokens and the preset's dense windows.

    Raises:
        ValueError: the preset does not support the shape, or attention is wrong.
    """
    view, query = random_view(preset, shape, batch, tokens, device, dtype)
    scaling = shape.head_dim**-0.5
    error = compare_view(view, query, scaling)
    time = median_ms(lambda: view.attend(query, None, scaling, None, None), device, repeats)
    size = _stored(view.keys) + _stored(view.values)
    numbers = 2 * batch * shape.kv_heads * view.shape("keys")[2] * shape.head_dim
    return DecodeTime(preset, name, batch, tokens, time, size / time / 1e6, 8 * size / numbers, attention_error=error)


def random_view(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Step, torch.Tensor]:
    """Layer with `tokens` random packed tokens and the preset's dense windows, and random queries `[B, Hq, 1, D]`.

    Raises:
        ValueError: the preset does not support the shape.
    """
    plan = middle_layer(named_config(preset))
    keys, values = (
        encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, windows=(plan.sink_tokens, plan.recent_tokens), codes="random",
            batch=batch, device=device,
        )
        for side in ("keys", "values")
    )  # fmt: skip
    choice: BackendChoice = "triton" if interpreting() else "auto"
    backend = resolve_backend(choice, device, (keys.codec, values.codec))
    query = torch.randn(batch, shape.query_heads, 1, shape.head_dim, device=device, dtype=dtype)
    return Step(keys, values, backend), query


def measure_decode(
    presets: Sequence[str],
    shapes: dict[str, Shape],
    batches: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    repeats: int = 20,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[DecodeTime]:
    """Measure full and compressed attention in `dtype` for every combination, and yield each row at once.

    On a GPU, other installed libraries are measured too. A failure becomes a row with its `error`.
    """
    libraries = installed() if device.type == "cuda" else []
    for (name, shape), batch, tokens in itertools.product(shapes.items(), batches, lengths):
        call = (name, shape, batch, tokens, device, dtype, repeats)
        full = DecodeTime("full", name, batch, tokens)
        for cache in ("full", *libraries, *presets):
            measure = compressed_time if cache in presets else full_time
            row = _or_error(cache, call, lambda: measure(cache, *call))  # noqa: B023 - called at once
            full = row if cache == "full" else full
            yield beside(row, full)


def beside(row: DecodeTime, full: DecodeTime) -> DecodeTime:
    """Add to `row` its speed-up over `full` and the bound on it, if both have figures."""
    if row.milliseconds and row.bits and full.milliseconds and full.bits:
        return replace(row, speedup=full.milliseconds / row.milliseconds, bound=full.bits / row.bits)
    return row


def _or_error(cache: str, call: tuple[Any, ...], measure: Callable[[], DecodeTime]) -> DecodeTime:
    try:
        return measure()
    except Exception as error:
        name, _, batch, tokens = call[:4]
        return DecodeTime(cache, name, batch, tokens, error=error_message(error))


def _stored(side: SideSegments) -> int:
    """Bytes that a step reads of one side."""
    factors = 0 if side.track is None else side.track.bytes_used()
    return sum(side.store.bytes_used().values()) + side.sinks.nbytes + side.tail.nbytes + factors
