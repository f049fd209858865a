"""Check a preset's kernels on the device against PyTorch's operators.

The check covers one dtype, two sequences with one query each and no mask, and repeated launches as well as Triton's
own; for a few presets also a static capacity (`check_static.py`). The kernel tests cover the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvcache_compress.backends import torch as reference
from kvcache_compress.backends.choice import BACKENDS, resolve_backend
from kvcache_compress.bench.compare import allowed_error, attention_problem, relative_error
from kvcache_compress.bench.layers import Shape, build_codec, encoded_side, middle_layer, named_config
from kvcache_compress.codecs.device import interpreting, on_device
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.backend import Backend
from kvcache_compress.storage.checks import LONGEST
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.encode import launch as encoding
from kvcache_compress.triton_kernels.update import append as appending

from .check_static import CODES_BAR, STATIC, check_steps, differing

BATCH = 2
COMPARED_TOKENS = 256
"""Tokens whose codes are compared with PyTorch's operators, which are slow for CommVQ."""


@dataclass(frozen=True)
class KernelCheck:
    """Result of checking one preset and shape: encoding, attention and steps against PyTorch's operators.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: packed tokens, rounded up to groups of the method.
        attention_error: RMS of the difference to the reference in float32, relative to the RMS of the output, the
            worst of all calls; None if there is NaN or infinity.
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
    cache: str,
    name: str,
    shape: Shape,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    steps: bool = True,
) -> KernelCheck:
    """Encode, append and attend to `tokens` packed tokens, with kernels and without, and compare.

    `steps`: also compare the steps of a static cache, for the presets in `STATIC`.

    Raises:
        ValueError: the preset does not support the shape.
    """
    plan = middle_layer(named_config(cache))
    backend = resolve_backend("triton" if interpreting() else "auto", device)
    sides: tuple[Literal["keys", "values"], ...] = ("keys", "values")
    methods = [(plan.side(side).method, plan.side(side).options(), side, shape.head_dim) for side in sides]
    group = math.lcm(*(build_codec(*method, shape.kv_heads, dtype, device).group for method in methods))
    keys, values = (
        encoded_side(
            *method, dtype, heads=shape.kv_heads, packed=-(-tokens // group) * group,
            windows=(plan.sink_tokens, plan.recent_tokens), batch=BATCH, device=device, backend=backend.name,
        )
        for method in methods
    )  # fmt: skip
    error, allowed = _attention_error(keys, values, shape, device, dtype, backend)
    different = 0.0
    for side in (keys, values):
        count = min(side.packed, COMPARED_TOKENS)
        x = torch.randn(BATCH, shape.kv_heads, count, shape.head_dim, device=device, dtype=dtype)
        rope = side.rope(0, count)
        torch_codec = side.codec.with_native(None)
        share = differing(backend.encoded(side.codec, x, rope), BACKENDS["torch"].encoded(torch_codec, x, rope))
        different = max(different, share)
    problem = attention_problem(error, allowed)
    if problem is None and not different <= CODES_BAR:
        problem = f"{different:.1e} of the stored words differ: allowed {CODES_BAR:g}"
    if problem is None and not _appends(shape, device, dtype):
        problem = "appended keys and values are wrong"
    on_triton = backend.name == "triton"
    if problem is None and on_triton and not all(_flushes(side, device, dtype) for side in (keys, values)):
        problem = "tokens that leave a tail are encoded, checked or moved wrongly"
    if problem is None and steps and on_triton and cache in STATIC:
        _, problem = check_steps(cache, shape, device, dtype)
    return KernelCheck(cache, name, tokens, error if math.isfinite(error) else None, different, problem)


def _attention_error(
    keys: View, values: View, shape: Shape, device: torch.device, dtype: torch.dtype, backend: Backend
) -> tuple[float, float]:
    """Error of attention and its allowed error, of the worst of all calls.

    The second call, with its query, sinks and tails elsewhere in memory, is a repeated launch, as all timed
    ones are.
    """
    scaling, calls = shape.head_dim**-0.5, []
    for _ in range(2):
        query = torch.randn(BATCH, shape.query_heads, 1, shape.head_dim, device=device, dtype=dtype)
        k_moved, v_moved = (
            replace(side, sinks=torch.randn_like(side.sinks), tail_buffer=torch.randn_like(side.tail_buffer))
            for side in (keys, values)
        )
        expected = reference.attend(AttentionCall.of(query.float(), scaling=scaling), k_moved, v_moved)
        calls.append((query, k_moved, v_moved, expected))
    errors = []
    for query, k_moved, v_moved, expected in calls:
        ours = k_moved.attend(AttentionCall.of(query, scaling=scaling), v_moved, backend)
        errors.append((relative_error(ours, expected), allowed_error(expected, dtype)))
    return max(errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0] / pair[1])


def _appends(shape: Shape, device: torch.device, dtype: torch.dtype) -> bool:
    """True if appended keys and values arrive in the tails, and nowhere else, also by a repeated launch."""
    size, right = (BATCH, shape.kv_heads, 8, shape.head_dim), True
    for at in (3, 6):
        new = [torch.randn(BATCH, shape.kv_heads, 1, shape.head_dim, device=device, dtype=dtype) for _ in range(2)]
        tails = [torch.zeros(size, device=device, dtype=dtype) for _ in range(2)]
        with on_device(new[0]):
            appending.append(*new, *tails, at)
        for x, tail in zip(new, tails, strict=True):
            expected = torch.zeros_like(tail)
            expected[:, :, at : at + 1] = x
            right = right and torch.equal(tail, expected)
    return right


def _flushes(side: View, device: torch.device, dtype: torch.dtype) -> bool:
    """True if the flush kernel encodes as the prompt's kernel does, moves the other tokens, and reports a NaN.

    The second of three calls is a repeated launch. Also True if the codec has no such kernel.
    """
    encoder, right = side.codec.kernel_encoder, True
    if encoder is None:
        return True
    batch, heads, _, dim = side.sinks.shape
    leaving = max(32, side.codec.group)
    flags = torch.ones(4, dtype=torch.int32, device=device)
    for call in range(3):
        tail = torch.randn(batch, heads, leaving + 8, dim, device=device, dtype=dtype)
        tail[-1, -1, leaving - 1, 0] = torch.nan if call == 2 else 1
        fields = tuple(
            torch.zeros(batch, heads, 2 * leaving // field.tokens, *field.shape, dtype=field.dtype, device=device)
            for field in side.codec.fields
        )
        moved = torch.zeros(batch, heads, 16, dim, device=device, dtype=dtype)
        with on_device(tail):
            rows = None if side.track is None else side.track.buffer
            encoding.flush(encoder, tail, leaving, 8, fields, leaving, moved, flags, LONGEST, rows)
            expected = BACKENDS["triton"].encoded(side.codec, tail[:, :, :leaving], side.rope(leaving, 2 * leaving))
        right = right and bool(flags.all()) == (call != 2)
        right = right and torch.equal(moved[:, :, :8], tail[:, :, leaving:]) and not moved[:, :, 8:].any()
        if call != 2:
            ours = tuple(x[:, :, x.shape[2] // 2 :] for x in fields)
            right = right and differing(ours, expected) <= CODES_BAR
            right = right and not any(bool(x[:, :, : x.shape[2] // 2].any()) for x in fields)
    return right
