"""Whether a preset's kernels are right on the device, by the compiled variants that are timed afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..backend import interpreting, load_part, on_device, resolve_backend
from ..codec import Fields
from ..view import PackedKV
from .layers import Shape, encoded_side, middle_layer, named_config

ATTENTION_BAR = 2e-3
"""RMS of the difference relative to that of the output, beside what rounding the output to 16 bits brings."""
CODES_BAR = 1e-3
"""Share of the stored words: where sums round differently, a number on the edge of two levels gets the other code."""

COMPARED_TOKENS = 512
"""Encoded by PyTorch's operators as well, which takes CommVQ long."""


@dataclass(frozen=True)
class KernelCheck:
    """One preset and shape: encoding, attention and appending against PyTorch's operators on the same device.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: packed ones.
        attention_error: RMS of the difference to the reference in float32, relative to the RMS of the output; None
            where there is NaN or infinity.
        differing_codes: share of the stored words that differ, scalars by more than a unit in the last place.
        error: why the kernels may not be timed.
    """

    cache: str
    shape: str
    tokens: int
    attention_error: float | None = None
    differing_codes: float | None = None
    error: str | None = None


@torch.inference_mode()
def check_kernels(
    cache: str, name: str, shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> KernelCheck:
    """Encodes, appends and attends to a sequence of `tokens` packed tokens with kernels and without.

    Raises:
        ValueError: a preset that does not fit the shape.
    """
    plan = middle_layer(named_config(cache))
    backend = resolve_backend("triton" if interpreting() else "auto", device)
    sides: tuple[Literal["keys", "values"], ...] = ("keys", "values")
    keys, values = (
        encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, windows=(plan.sink_tokens, plan.recent_tokens), device=device,
            backend=backend,
        )
        for side in sides
    )  # fmt: skip
    query = torch.randn(1, shape.query_heads, 1, shape.head_dim, device=device, dtype=dtype)
    scaling = shape.head_dim**-0.5
    ours = PackedKV(keys, values, "keys", backend).attend(query, None, scaling, None, None)
    expected = load_part(".reference").attend(query.float(), keys, values, None, scaling=scaling)
    error, rounding = _distance(ours, expected), _distance(expected.to(dtype), expected)

    different = 0.0
    for side in (keys, values):
        count = min(tokens, COMPARED_TOKENS)
        x = torch.randn(1, shape.kv_heads, count, shape.head_dim, device=device, dtype=dtype)
        rope = side.rope(0, count)
        with on_device(x):
            found = differing(side.codec.encode(x, rope, backend), side.codec.encode(x, rope, "torch"))
        different = max(different, found)
    problem = None
    if not error**2 <= ATTENTION_BAR**2 + rounding**2:  # NaN is no number to be at most anything
        problem = f"attention differs by {error:.1e} of its size: allowed {ATTENTION_BAR:g}"
    elif not different <= CODES_BAR:
        problem = f"{different:.1e} of the stored words differ: allowed {CODES_BAR:g}"
    elif not _appends(shape, device, dtype):
        problem = "appended keys and values are not those that were given"
    return KernelCheck(cache, name, tokens, error if math.isfinite(error) else None, different, problem)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def differing(ours: Fields, theirs: Fields) -> float:
    """Share of the words of encoded fields that differ; of 16-bit scalars those by more than one in the last place."""
    unequal = total = 0
    for mine, yours in zip(ours, theirs, strict=True):
        if mine.dtype == torch.float16:
            bad = (mine.view(torch.int16).int() - yours.view(torch.int16).int()).abs() > 1
        else:
            bad = mine != yours
        unequal += int(bad.sum())
        total += bad.numel()
    return unequal / total if total else 0.0


def _appends(shape: Shape, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step's key and value arrive in the tails."""
    size = (1, shape.kv_heads, 1, shape.head_dim)
    new = [torch.randn(size, device=device, dtype=dtype) for _ in range(2)]
    room = [torch.zeros(1, shape.kv_heads, 8, shape.head_dim, device=device, dtype=dtype)[:, :, 3:4] for _ in new]
    with on_device(new[0]):
        load_part(".triton_kernels.append").append(*new, *room)
    return all(torch.equal(x, y) for x, y in zip(new, room, strict=True))
