"""Decode attention of one layer: a token's queries over a long compressed cache, beside attention over a dense one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backend import interpreting, resolve_backend
from ..config import load_config
from ..view import PackedKV, SideSegments
from .layers import Shape, encoded_side, middle_layer
from .timing import median_ms

SETS_BYTES = 256 << 20
"""Inputs take turns until so many bytes lie between two uses of one: several times a GPU's L2."""


@dataclass(frozen=True)
class DecodeTime:
    """One measurement.

    Attributes:
        cache: preset, or `full` for scaled dot-product attention over 16-bit keys and values.
        shape: name of the model's shape.
        milliseconds: median time of one layer and step.
        gigabytes_per_second: bytes that the layer stores over that time.
        bits: stored bits per number, everything in the layer counted.
        speedup: over `full` of the same batch and length; `bound` is what the bytes would allow.
    """

    cache: str
    shape: str
    batch: int
    tokens: int
    milliseconds: float
    gigabytes_per_second: float
    bits: float
    speedup: float | None = None
    bound: float | None = None


def full_time(name: str, shape: Shape, batch: int, tokens: int, device: torch.device, repeats: int = 20) -> DecodeTime:
    """PyTorch's attention with grouped queries over bfloat16 keys and values, flash where there is one."""
    size = batch * tokens * shape.dense_bytes

    def inputs() -> tuple[torch.Tensor, ...]:
        heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        lengths = (1, tokens, tokens)
        return tuple(
            torch.randn(batch, count, length, shape.head_dim, device=device, dtype=torch.bfloat16)
            for count, length in zip(heads, lengths, strict=True)
        )

    sets = [inputs() for _ in range(_sets(size))]
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if device.type == "cuda" else list(_ANY)
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backends, set_priority=True):
        time = median_ms([lambda one=one: attend(*one, enable_gqa=True) for one in sets], device, repeats)  # type: ignore[misc]
    return DecodeTime("full", name, batch, tokens, time, size / time / 1e6, 16.0, 1.0, 1.0)


_ANY = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def compressed_time(
    preset: str, name: str, shape: Shape, batch: int, tokens: int, device: torch.device, repeats: int = 20
) -> DecodeTime:
    """Fused attention as a model calls it, over random codes.

    Raises:
        ValueError: a preset that does not fit the shape.
    """
    plan = middle_layer(load_config(preset))

    def view() -> PackedKV:
        keys, values = (
            encoded_side(
                plan.side(side).method, plan.side(side).options(), side, shape.head_dim, torch.bfloat16,
                heads=shape.kv_heads, packed=tokens, codes="random", batch=batch, device=device,
            )
            for side in ("keys", "values")
        )  # fmt: skip
        return PackedKV(keys, values, "keys", resolve_backend("triton" if interpreting() else "auto", device))

    first = view()
    size = _stored(first.keys) + _stored(first.values)
    views = [first, *(view() for _ in range(_sets(size) - 1))]
    query = torch.randn(batch, shape.query_heads, 1, shape.head_dim, device=device, dtype=torch.bfloat16)
    scaling = shape.head_dim**-0.5
    calls = [lambda one=one: one.attend(query, None, scaling, None, None) for one in views]
    time = median_ms(calls, device, repeats)
    numbers = 2 * batch * shape.kv_heads * first.shape[2] * shape.head_dim
    return DecodeTime(preset, name, batch, tokens, time, size / time / 1e6, 8 * size / numbers)


def measure_decode(
    presets: Sequence[str],
    shapes: dict[str, Shape],
    batches: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    repeats: int = 20,
) -> Iterator[DecodeTime]:
    """Full and compressed attention for every combination, as they are measured; out of memory skips one."""
    for (name, shape), batch, tokens in itertools.product(shapes.items(), batches, lengths):
        try:
            full: DecodeTime | None = full_time(name, shape, batch, tokens, device, repeats)
        except torch.OutOfMemoryError:
            full = None
        if full is not None:
            yield full
        for preset in presets:
            try:
                found = compressed_time(preset, name, shape, batch, tokens, device, repeats)
            except torch.OutOfMemoryError:
                continue
            yield found if full is None else _compared(found, full)


def _compared(found: DecodeTime, full: DecodeTime) -> DecodeTime:
    speedup = full.milliseconds / found.milliseconds
    return DecodeTime(**{**vars(found), "speedup": speedup, "bound": 16 / found.bits})


def _sets(size: int) -> int:
    return max(1, min(8, SETS_BYTES // size))


def _stored(side: SideSegments) -> int:
    """Bytes that a step reads of one side."""
    factors = 0 if side.track is None else side.track.bytes_used()
    return sum(side.store.bytes_used().values()) + side.sinks.nbytes + side.tail.nbytes + factors
