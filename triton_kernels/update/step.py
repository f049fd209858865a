"""One decode step of sequences whose tails are circular, in a static layer or in pages, in one launch.

Each program packs a head's tokens that leave the recent window, and then writes the new ones. A side whose method has
no kernel encoder is only written: PyTorch's operators have packed it. Numbers of tokens are read from memory, so a
recorded CUDA graph can be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.modeling.rope import Rope
from kvcache_compress.storage.checks import LONGEST
from kvcache_compress.storage.paged import PagedStorage
from kvcache_compress.storage.static import StaticStorage
from kvcache_compress.triton_kernels.common.codes import NewTile, in_block
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import repeated
from kvcache_compress.triton_kernels.encode.launch import dtypes, exact_precision, rope_inputs

ROWS = tl.constexpr(16)
"""Fewest tokens that are encoded at a time."""
_STRIDES = tuple(f"s_{name}_{axis}" for name in ("k", "v") for axis in "bht")
SINKS, TAIL, FIELDS = (tl.constexpr(place) for place in range(3))
"""Indices into a side's memory: sinks, tail, fields."""
UNENCODED = KernelEncoder(None, ())
"""Stands in for the encoder of a side that has none."""


class StepSide(NamedTuple):
    """Constants of a side.

    dim, padded: head dimension, and as a power of two; group: tokens encoded together; meta: the encoder's constants;
    strides: numbers from one block of a field to the next, empty without pages.
    """

    dim: int
    padded: int
    group: int
    meta: tuple[Any, ...]
    strides: tuple[int, ...]


class StepForm(NamedTuple):
    """Constants of a step: heads, new tokens, padded new tokens, slots of sinks, slots of the tail.

    recent: tokens of the recent window; flush: tokens packed at a time; longest: largest norm of a vector; page: tokens
    of a page, 0 without pages; stride, rotary, pairs: tokens of a group, and pairs whose cos and sin the step keeps for
    new groups (0 if it keeps none), also as a power of two.
    """

    heads: int
    count: int
    padded: int
    sinks: int
    tail: int
    recent: int
    flush: int
    longest: float
    page: int
    stride: int
    rotary: int
    pairs: int


class Counts(NamedTuple):
    """A sequence's slot, sinks, packed and tail tokens before the step, packed ones after it, and its block table."""

    slot: Any
    sinks: Any
    packed: Any
    tail: Any
    flushed: Any
    p_blocks: Any


@triton.jit
def _step_side(
    p_x, memory, tables, p_rope, p_fault, s_b, s_h, s_t, i_b, i_h, counts, capacity, rows,
    SIDE: tl.constexpr, STEP: tl.constexpr, ENCODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode the tokens that are packed from this step on, `STEP.flush` or none, and write the step's own."""
    META: tl.constexpr = SIDE.meta
    STRIDES: tl.constexpr = SIDE.strides
    BLOCK: tl.constexpr = SIDE.group if SIDE.group > ROWS else ROWS
    i_sh = counts.slot * STEP.heads + i_h
    if ENCODE is not None:  # noqa: SIM102 - known as it is compiled
        if counts.flushed > counts.packed:
            for start in range(0, STEP.flush, BLOCK):
                o_token = counts.packed + start + tl.arange(0, BLOCK)
                fields, o_row, m_t = memory[FIELDS:], i_sh * rows + o_token, o_token < counts.flushed
                if STEP.page:
                    i_block = tl.load(counts.p_blocks + (counts.packed + start) // STEP.page)
                    fields = in_block(fields, i_block, STRIDES)
                    o_row = i_h * STEP.page + o_token % STEP.page
                else:
                    m_t &= o_token < rows  # in a full layer
                o_x = (i_sh * STEP.tail + o_token % STEP.tail) * SIDE.dim
                tile = NewTile(memory[TAIL], o_x, m_t, fields, o_row, p_rope, o_token, tables, i_h)
                ENCODE(tile, SIDE.dim, META, PRECISION)
            # From here on their slots may be overwritten.
            tl.debug_barrier()
    o_n, o_d = tl.arange(0, STEP.padded), tl.arange(0, SIDE.padded)[None, :]
    m_x = (o_n < STEP.count)[:, None] & (o_d < SIDE.dim)
    b_x = tl.load(p_x + i_b * s_b + i_h * s_h + o_n[:, None] * s_t + o_d, mask=m_x, other=0.0)
    b_length = tl.sqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1))
    b_good = b_length <= STEP.longest
    b_x = tl.where(b_good[:, None], b_x, 0.0)
    o_sink = counts.sinks + o_n
    p_sinks = memory[SINKS] + (i_sh * STEP.sinks + o_sink[:, None]) * SIDE.dim
    tl.store(p_sinks + o_d, b_x, mask=m_x & (o_sink < STEP.sinks)[:, None])
    # While sinks are missing, nothing is packed or in the tail; a multiple of the slots keeps numbers positive.
    o_slot = (counts.packed + counts.tail + o_sink - STEP.sinks + STEP.sinks * STEP.tail) % STEP.tail
    p_tail = memory[TAIL] + (i_sh * STEP.tail + o_slot[:, None]) * SIDE.dim
    tl.store(p_tail + o_d, b_x, mask=m_x & (o_sink >= STEP.sinks)[:, None])
    fault = 1 - tl.min(b_good.to(tl.int32), 0)
    fault = tl.where(counts.sinks + counts.packed + counts.tail + STEP.count > capacity, 2, fault)
    tl.store(p_fault, fault.to(tl.int64), mask=fault > 0)


@triton.jit
def _keep_rope(p_cos, p_sin, p_columns, p_rope, s_t, start, rows, STEP: tl.constexpr):
    """Write cos and sin of the step's tokens that begin a group; the first of them is token `start` after the sinks."""
    o_token, o_p = start + tl.arange(0, STEP.padded), tl.arange(0, STEP.pairs)[None, :]
    o_row, m_p = o_token // STEP.stride, o_p < STEP.rotary
    m_row = (tl.arange(0, STEP.padded) < STEP.count) & (o_token >= 0) & (o_token % STEP.stride == 0) & (o_row < rows)
    o_x = tl.arange(0, STEP.padded)[:, None] * s_t + tl.load(p_columns + o_p, mask=m_p, other=0)
    p_row, m_x = p_rope + o_row[:, None] * (2 * STEP.rotary) + o_p, m_row[:, None] & m_p
    tl.store(p_row, tl.load(p_cos + o_x, mask=m_x).to(p_rope.dtype.element_ty), mask=m_x)
    tl.store(p_row + STEP.rotary, tl.load(p_sin + o_x, mask=m_x).to(p_rope.dtype.element_ty), mask=m_x)


@triton.jit(
    do_not_specialize=(*_STRIDES, "s_cos_b", "s_cos_t", "s_rope", "capacity", "k_rows", "v_rows", "r_rows", "s_counts"),
    do_not_specialize_on_alignment=("p_k", "p_v", "p_cos", "p_sin", "p_total"),
)
def step_kernel(
    p_k, p_v, p_cos, p_sin, p_columns, p_rope, keys, values, k_tables, v_tables, p_counts, p_faults, p_total, s_k_b,
    s_k_h, s_k_t, s_v_b, s_v_h, s_v_t, s_cos_b, s_cos_t, s_rope, s_counts, capacity, k_rows, v_rows, r_rows,
    K: tl.constexpr, V: tl.constexpr, K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, MOVES: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Store the tokens of a step of one head: keys in programs `(·, 0)`, values in programs `(·, 1)`.

    `keys` and `values` are each side's memory, from `SINKS` to `FIELDS`; fields have `k_rows` or `v_rows` tokens per
    head. `p_counts` has a row per sequence, with stride `s_counts`: its slot, its numbers of sinks, packed and tail
    tokens, and the blocks of its pages. With `MOVES` each program has a row of its own and updates it; with `COUNTED`
    the first program also writes the total to `p_total`. `capacity` is the most tokens of a sequence. A
    sequence's first program writes cos and sin of new groups to the first `r_rows` rows of `p_rope`.
    """
    i_b, i_h = (tl.program_id(0) // STEP.heads).to(tl.int64), (tl.program_id(0) % STEP.heads).to(tl.int64)
    p_counts += i_b * s_counts
    if MOVES:
        p_counts += (2 * i_h + tl.program_id(1)) * 4
    sinks, packed, tail = tl.load(p_counts + 1), tl.load(p_counts + 2), tl.load(p_counts + 3)
    flushed = packed + tl.where(tail > STEP.recent, (tail - STEP.recent) // STEP.flush * STEP.flush, 0)
    counts = Counts(tl.load(p_counts), sinks, packed, tail, flushed, p_counts + 4)
    p_rope += i_b * s_rope
    p_faults += 2 * tl.program_id(0) + tl.program_id(1)
    if tl.program_id(1) == 0:
        if STEP.rotary:  # noqa: SIM102 - known as it is compiled
            if i_h == 0:
                start = sinks + packed + tail - STEP.sinks
                _keep_rope(
                    p_cos + i_b * s_cos_b, p_sin + i_b * s_cos_b, p_columns, p_rope, s_cos_t, start, r_rows, STEP
                )
        _step_side(
            p_k, keys, k_tables, p_rope, p_faults, s_k_b, s_k_h, s_k_t, i_b, i_h, counts, capacity, k_rows,
            K, STEP, K_ENCODE, PRECISION,
        )  # fmt: skip
    else:
        _step_side(
            p_v, values, v_tables, p_rope, p_faults, s_v_b, s_v_h, s_v_t, i_b, i_h, counts, capacity, v_rows,
            V, STEP, V_ENCODE, PRECISION,
        )  # fmt: skip
    if MOVES:
        # Wait until every warp has read the counters.
        tl.debug_barrier()
        all_sinks = tl.minimum(sinks + STEP.count, STEP.sinks)
        total = sinks + packed + tail + STEP.count
        tl.store(p_counts + 1, all_sinks)
        tl.store(p_counts + 2, flushed)
        tl.store(p_counts + 3, total - all_sinks - flushed)
        if COUNTED and tl.program_id(0) == 0 and tl.program_id(1) == 0:
            tl.store(p_total, total)


def step(
    storage: StaticStorage | PagedStorage,
    fresh: Mapping[Side, torch.Tensor],
    counts: torch.Tensor,
    faults: torch.Tensor,
    counter: torch.Tensor | None = None,
    rope: Rope | None = None,
) -> None:
    """Store tokens `[B, H, n, D]` of a static layer, or of the decode steps of pages with n = 1.

    Sides without a kernel encoder stay unpacked.

    Args:
        counts: `StaticStorage.counts`, or the pages' rows of `Backend.attend_to_pages` from before the step.
        faults: int64 `[B, 2 H]`, by program: becomes 1 if a vector cannot be packed, and 2 if the layer is full.
        counter: int64 `[]`, receives the number of tokens of a static layer.
        rope: cos and sin of its new tokens, `[1 or B, n, C]`, to keep those of new groups.
    """
    windows, rows, page, track = storage.windows, storage.rope_rows, storage.page, storage.track
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in fresh.values())
    sinks, tails, fields = (list(x.values()) for x in (storage.sinks, storage.tails, storage.pools))
    k_encoder, v_encoder = (codec.kernel_encoder or UNENCODED for codec in storage.codecs.values())
    s_k_b, s_k_h, s_k_t, _ = keys.stride()
    s_v_b, s_v_h, s_v_t, _ = values.stride()
    cos = sin = columns = counts
    stride = rotary = r_rows = 0
    if rope is not None and track is not None and rows is not None:
        cos, sin = (x.contiguous() for x in rope)
        columns, stride, rotary = track.layout.columns_on(counts.device), track.stride, track.layout.rotary
        r_rows = rows.shape[1] - 1
    inputs = dict(
        p_k=keys, p_v=values, p_cos=cos, p_sin=sin, p_columns=columns,
        keys=(sinks[0], tails[0], *fields[0]), values=(sinks[1], tails[1], *fields[1]),
        k_tables=k_encoder.tables, v_tables=v_encoder.tables, p_counts=counts, p_faults=faults,
        p_total=counts if counter is None else counter,
        s_k_b=s_k_b, s_k_h=s_k_h, s_k_t=s_k_t, s_v_b=s_v_b, s_v_h=s_v_h, s_v_t=s_v_t, s_counts=counts.stride(0),
        s_cos_b=cos.stride(0) if len(cos) > 1 else 0, s_cos_t=cos.stride(1), r_rows=r_rows,
        capacity=windows.capacity or 2**31 - 1, k_rows=fields[0][0].shape[2], v_rows=fields[1][0].shape[2],
        **rope_inputs(rows, fields[0][0]),
    )  # fmt: skip
    strides = [tuple([x.stride(0) for x in side]) if page else () for side in fields]

    def complete() -> tuple[tuple[int, int, int], dict[str, Any]]:
        batch, heads, count, _ = keys.shape
        k_side, v_side = (
            StepSide(tail.shape[3], next_power_of_2(tail.shape[3]), encoder.group, encoder.meta, apart)
            for tail, encoder, apart in zip(tails, (k_encoder, v_encoder), strides, strict=True)
        )
        step = StepForm(
            heads, count, next_power_of_2(count), windows.sinks, tails[0].shape[2], windows.recent, windows.flush,
            LONGEST, page, stride, rotary, next_power_of_2(rotary),
        )  # fmt: skip
        return (batch * heads, 2, 1), dict(
            K=k_side, V=v_side, K_ENCODE=k_encoder.encode, V_ENCODE=v_encoder.encode, STEP=step,
            PRECISION=exact_precision(), MOVES=not page, COUNTED=counter is not None, num_warps=4,
            **launch_options(fusion=False),
        )  # fmt: skip

    kind = (
        keys.shape, tails[0].shape[1:], tails[1].shape[3], windows.sinks, windows.recent, windows.flush,
        counter is None, dtypes((keys, values, *tails)), k_encoder.kind, v_encoder.kind, dtypes(fields[0], rows),
        dtypes(fields[1]), page, *strides, stride, rotary, cos.dtype,
    )  # fmt: skip
    repeated(step_kernel, inputs, kind, complete, counts.device)
