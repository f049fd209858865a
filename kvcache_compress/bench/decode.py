"""Time decode attention of one layer: one token's queries over a long compressed cache, and over a dense one.

The functions return figures by name:

    milliseconds            median time of one layer and step
    gigabytes_per_second    stored bytes of the layer, divided by that time
    bits                    stored bits per number, everything in the layer counted; 16 or 32 for uncompressed caches
    attention_error         relative error of some rows, compared before the timing (`compare.py`)
    libraries               of PyTorch's functions: milliseconds of each, or why it does not count

They raise `ValueError` if the attention is wrong.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.eval.provenance.results import error_message
from kvcache_compress.storage.view import View

from .compare import ATTENTION_BAR, LIBRARY_BAR, compare, decoded
from .layers import Shape, encoded_side, middle_layer, named_config
from .timing import median_ms

LIBRARIES = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def full_time(
    shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, repeats: int = 20
) -> dict[str, Any]:
    """Time PyTorch's fastest correct attention over uncompressed keys and values.

    The queries that share a key/value head are passed as tokens of one head.
    """
    query = torch.randn(batch, shape.query_heads, shape.head_dim, device=device, dtype=dtype)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    rows = query.unflatten(1, (shape.kv_heads, -1))
    libraries, right = dict[str, float | str](), list[tuple[float, float]]()
    for name, library in LIBRARIES.items():

        def attend(library: SDPBackend = library) -> torch.Tensor:
            with sdpa_kernel(library):
                return scaled_dot_product_attention(rows, keys, values).reshape(query.shape)

        try:
            error = compare(attend, query, lambda some: (keys[some].float(), values[some].float()), LIBRARY_BAR)
            libraries[name] = time = median_ms(attend, device, repeats)
            right.append((time, error))
        except Exception as failure:
            libraries[name] = error_message(failure)[:200]
    if not right:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in libraries.items()))
    time, error = min(right)
    speed = (keys.nbytes + values.nbytes) / time / 1e6
    return {
        "milliseconds": time, "gigabytes_per_second": speed, "bits": 8.0 * dtype.itemsize,
        "attention_error": error, "libraries": libraries,
    }  # fmt: skip


def compressed_time(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, repeats: int = 20
) -> dict[str, Any]:
    """Time fused attention as a model calls it, over `tokens` random packed tokens and the preset's dense windows.

    preset: its name, or `none` for our kernel over uncompressed keys and values.
    """
    keys, values, query = random_view(preset, shape, batch, tokens, device, dtype)

    def attend() -> torch.Tensor:
        return keys.attend(AttentionCall.of(query, scaling=shape.head_dim**-0.5), values)

    def read(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return decoded(keys, rows), decoded(values, rows)

    error = compare(lambda: attend()[:, 0], query[:, :, 0], read, ATTENTION_BAR)
    time = median_ms(attend, device, repeats)
    size = _stored(keys) + _stored(values)
    numbers = 2 * batch * shape.kv_heads * keys.shape[2] * shape.head_dim
    figures = {"milliseconds": time, "gigabytes_per_second": size / time / 1e6, "bits": 8 * size / numbers}
    return {**figures, "attention_error": error}


def random_view(
    preset: str, shape: Shape, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[View, View, torch.Tensor]:
    """Keys and values of a layer with `tokens` random packed tokens, and queries `[B, Hq, 1, D]`."""
    plan = middle_layer(named_config(preset))
    windows = (plan.sink_tokens, plan.recent_tokens)
    keys, values = (
        encoded_side(
            plan, side, shape.head_dim, dtype,
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
