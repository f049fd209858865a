"""Time decode attention of one layer: one token's queries over a long compressed cache, and over a dense one.

The functions return figures by name:

    milliseconds            median time of one layer and step
    gigabytes_per_second    stored bytes of the layer, divided by that time
    bits                    stored bits per number, everything in the layer counted; 16 or 32 for uncompressed caches
    attention_error         relative error of some rows, compared before the timing (`compare.py`)
    libraries               of PyTorch's functions: milliseconds of each, or why it was not timed
    invalid                 why the time does not count
"""

from dataclasses import replace
from typing import Any

import torch

from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import error_message
from kvcache_compress.storage.view import View

from .compare import LIBRARY_BAR, compare, compare_views
from .layers import Shape, encoded_side, middle_layer, named_config
from .peers import ON_CPU, ON_GPU
from .timing import median_ms


def full_time(
    shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, repeats: int = 20
) -> dict[str, Any]:
    """Time PyTorch's fastest correct attention with grouped queries over uncompressed keys and values."""
    query = torch.randn(batch, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    libraries: dict[str, float | str] = {}
    best: tuple[float, float | None] | None = None
    for library, make in (ON_GPU if device.type == "cuda" else ON_CPU).items():
        try:
            attend = make(query, keys, values)
            error, problem = compare(
                attend, query, lambda rows: (keys[rows].float(), values[rows].float()), shape.head_dim**-0.5,
                LIBRARY_BAR,
            )  # fmt: skip
            if problem is not None:
                raise ValueError(problem)
            libraries[library] = time = median_ms(attend, device, repeats)
            if best is None or time < best[0]:
                best = time, error
        except Exception as failure:
            libraries[library] = error_message(failure)[:200]
    if best is None:
        raise ValueError("; ".join(f"{library}: {why}" for library, why in libraries.items()))
    time, error = best
    speed = (keys.nbytes + values.nbytes) / time / 1e6
    return {
        "milliseconds": time, "gigabytes_per_second": speed, "bits": 8.0 * dtype.itemsize, "attention_error": error,
        "libraries": libraries,
    }  # fmt: skip


def compressed_time(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, repeats: int = 20
) -> dict[str, Any]:
    """Time fused attention as a model calls it, over `tokens` random packed tokens and the preset's dense windows.

    preset: its name, or `none` for our kernel over uncompressed keys and values.
    """
    keys, values, query = random_view(preset, shape, batch, tokens, device, dtype)
    scaling = shape.head_dim**-0.5
    error, problem = compare_views(keys, values, query, scaling)
    time = median_ms(lambda: keys.attend(AttentionCall.of(query, scaling=scaling), values), device, repeats)
    size = _stored(keys) + _stored(values)
    numbers = 2 * batch * shape.kv_heads * keys.shape[2] * shape.head_dim
    figures = {"milliseconds": time, "gigabytes_per_second": size / time / 1e6, "bits": 8 * size / numbers}
    return {**figures, "attention_error": error, "invalid": problem}


def random_view(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[View, View, torch.Tensor]:
    """Keys and values of a layer with `tokens` random packed tokens, and queries `[B, Hq, 1, D]`."""
    plan = middle_layer(named_config(preset))
    windows = (plan.sink_tokens, plan.recent_tokens)
    keys, values = (
        encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, windows=windows, codes="random", batch=batch, device=device,
        )
        for side in ("keys", "values")
    )  # fmt: skip
    choice = "triton" if interpreting() else "auto"
    backend = resolve_backend(
        choice, device, ((type(c), c.options, c.context.side) for c in (keys.codec, values.codec))
    )
    query = torch.randn(batch, shape.query_heads, 1, shape.head_dim, device=device, dtype=dtype)
    return replace(keys, backend=backend), replace(values, backend=backend), query


def _stored(side: View) -> int:
    """Bytes that a step reads of one side."""
    factors = 0 if side.track is None else side.track.bytes_used()
    return sum(side.store.bytes_used().values()) + side.sinks.nbytes + side.tail.nbytes + factors
