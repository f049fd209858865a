"""One step of a static layer: encode the tokens that leave the recent window and write the new ones.

One kernel does both. A side whose method has no kernel encoder is only written: PyTorch's operators encode it
(`StepBuffers.encode`). The number of tokens is read from memory, so a recorded CUDA graph can be replayed. Each program
has its own counters: none is overwritten while another program may still read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.storage.checks import LONGEST
from kvcache_compress.storage.side import SideState
from kvcache_compress.storage.step_buffers import StepBuffers
from kvcache_compress.triton_kernels.common.codes import NewTile
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


class SlotSide(NamedTuple):
    """Constants of a side: head dimension, padded head dimension, group size, encoder constants."""

    dim: int
    padded: int
    group: int
    meta: tuple[Any, ...]


class Step(NamedTuple):
    """Constants of a step: heads, new tokens, padded new tokens, slots of sinks, slots of the tail.

    recent: tokens of the recent window; flush: tokens encoded at a time; longest: largest norm of a vector.
    """

    heads: int
    count: int
    padded: int
    sinks: int
    tail: int
    recent: int
    flush: int
    longest: float


@triton.jit
def _step_side(
    p_x, memory, tables, p_rope, p_fault, s_b, s_h, s_t, i_b, i_h, length, packed, flushed, capacity, packed_capacity,
    rows,
    SIDE: tl.constexpr, STEP: tl.constexpr, ENCODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode the tokens that are packed from this step on, tail slots to rows of the store; write the step's own.

    The former are `STEP.flush` or none, as no step has more tokens than that.
    """
    META: tl.constexpr = SIDE.meta
    BLOCK: tl.constexpr = SIDE.group if SIDE.group > ROWS else ROWS
    i_bh = i_b * STEP.heads + i_h
    if ENCODE is not None:  # noqa: SIM102 - known as it is compiled
        if flushed > packed:
            for start in range(0, STEP.flush, BLOCK):
                o_token = packed + start + tl.arange(0, BLOCK)
                o_x = (i_bh * (STEP.tail + 1) + o_token % STEP.tail) * SIDE.dim
                m_t = (o_token < flushed) & (o_token < packed_capacity)
                tile = NewTile(
                    memory[TAIL], o_x, m_t, memory[FIELDS:], i_bh * rows + o_token, p_rope, o_token, tables, i_h
                )
                ENCODE(tile, SIDE.dim, META, PRECISION)
            # From here on their slots may be overwritten.
            tl.debug_barrier()
    o_n, o_d = tl.arange(0, STEP.padded)[:, None], tl.arange(0, SIDE.padded)[None, :]
    m_x = (o_n < STEP.count) & (o_d < SIDE.dim)
    b_x = tl.load(p_x + i_b * s_b + i_h * s_h + o_n * s_t + o_d, mask=m_x, other=0.0)
    o_new = length - STEP.sinks + o_n
    p_sinks = memory[SINKS] + (i_bh * STEP.sinks + length + o_n) * SIDE.dim
    tl.store(p_sinks + o_d, b_x, mask=m_x & (o_new < 0))
    p_tail = memory[TAIL] + i_bh * (STEP.tail + 1) * SIDE.dim
    o_slot = (o_new + STEP.sinks * STEP.tail) % STEP.tail
    tl.store(p_tail + o_slot * SIDE.dim + o_d, b_x, mask=m_x & (o_new >= 0))
    b_length = tl.sqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1))
    fault = 1 - tl.min((b_length <= STEP.longest).to(tl.int32), 0)
    fault = tl.where(length + STEP.count > capacity, 2, fault)
    tl.store(p_fault, fault.to(tl.int64), mask=fault > 0)


@triton.jit(
    do_not_specialize=(*_STRIDES, "s_rope", "capacity", "packed_capacity", "k_rows", "v_rows"),
    do_not_specialize_on_alignment=("p_k", "p_v", "p_total"),
)
def write_slots_kernel(
    p_k, p_v, p_rope, keys, values, k_tables, v_tables, p_counts, p_total, s_k_b, s_k_h, s_k_t, s_v_b, s_v_h, s_v_t,
    s_rope, capacity, packed_capacity, k_rows, v_rows, p_numbers,
    K: tl.constexpr, V: tl.constexpr, K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Write a step's tokens of one head to sinks or tail: keys in programs `(·, 0)`, values in programs `(·, 1)`.

    `keys` and `values` are each side's memory, from `SINKS` to `FIELDS`. A side with an encoder first encodes what is
    packed from this step on, into fields of `k_rows` or `v_rows` tokens per head. Last, the counters rise, with
    `COUNTED` also `p_total`, and `p_numbers` get the `Slots.rows`. `capacity` is the most tokens of the layer.
    """
    i_p, programs = tl.program_id(0) * 2 + tl.program_id(1), tl.num_programs(0) * 2
    length, packed = tl.load(p_counts + i_p), tl.load(p_counts + programs + i_p)
    p_fault = p_counts + 2 * programs + i_p
    waiting = length - STEP.sinks - packed - STEP.recent
    flushed = packed + tl.where(waiting > 0, waiting // STEP.flush * STEP.flush, 0)
    i_b, i_h = (tl.program_id(0) // STEP.heads).to(tl.int64), (tl.program_id(0) % STEP.heads).to(tl.int64)
    p_rope += i_b * s_rope
    if tl.program_id(1) == 0:
        _step_side(
            p_k, keys, k_tables, p_rope, p_fault, s_k_b, s_k_h, s_k_t, i_b, i_h, length, packed, flushed, capacity,
            packed_capacity, k_rows, K, STEP, K_ENCODE, PRECISION,
        )  # fmt: skip
    else:
        _step_side(
            p_v, values, v_tables, p_rope, p_fault, s_v_b, s_v_h, s_v_t, i_b, i_h, length, packed, flushed, capacity,
            packed_capacity, v_rows, V, STEP, V_ENCODE, PRECISION,
        )  # fmt: skip
    # Wait until every warp has read the counters.
    tl.debug_barrier()
    tl.store(p_counts + i_p, length + STEP.count)
    tl.store(p_counts + programs + i_p, flushed)
    if COUNTED and i_p == 0:
        tl.store(p_total, length + STEP.count)
    if i_h == 0 and tl.program_id(1) == 0:
        sinks = tl.minimum(length + STEP.count, STEP.sinks)
        tl.store(p_numbers + i_b * 4 + 1, sinks)
        tl.store(p_numbers + i_b * 4 + 2, flushed)
        tl.store(p_numbers + i_b * 4 + 3, length + STEP.count - sinks - flushed)


def write_slots(
    buffers: StepBuffers,
    sides: Mapping[Side, SideState],
    fresh: Mapping[Side, torch.Tensor],
    counter: torch.Tensor | None,
) -> None:
    """Run a step as `StepBuffers.step` does, but leave sides without a kernel encoder unencoded."""
    windows, counts, rope = buffers.windows, buffers.counts, sides["keys"].rope_rows
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in fresh.values())
    sinks, tails = list(buffers.sinks.values()), list(buffers.tail.values())
    fields = [state.store.buffers for state in sides.values()]
    k_encoder, v_encoder = (state.codec.kernel_encoder or UNENCODED for state in sides.values())
    s_k_b, s_k_h, s_k_t, _ = keys.stride()
    s_v_b, s_v_h, s_v_t, _ = values.stride()
    inputs = dict(
        p_k=keys, p_v=values, keys=(sinks[0], tails[0], *fields[0]), values=(sinks[1], tails[1], *fields[1]),
        k_tables=k_encoder.tables, v_tables=v_encoder.tables, p_counts=counts,
        p_total=counts if counter is None else counter,
        s_k_b=s_k_b, s_k_h=s_k_h, s_k_t=s_k_t, s_v_b=s_v_b, s_v_h=s_v_h, s_v_t=s_v_t, capacity=buffers.capacity,
        p_numbers=buffers.rows, packed_capacity=windows.packed_capacity,
        k_rows=fields[0][0].shape[2], v_rows=fields[1][0].shape[2],
        **rope_inputs(rope, fields[0][0]),
    )  # fmt: skip

    def complete() -> tuple[tuple[int, int, int], dict[str, Any]]:
        batch, heads, count, _ = keys.shape
        k_side, v_side = (
            SlotSide(tail.shape[3], next_power_of_2(tail.shape[3]), encoder.group, encoder.meta)
            for tail, encoder in zip(tails, (k_encoder, v_encoder), strict=True)
        )
        step = Step(
            heads, count, next_power_of_2(count), windows.sinks, windows.tail_capacity, windows.recent, windows.flush,
            LONGEST,
        )  # fmt: skip
        return (batch * heads, 2, 1), dict(
            K=k_side, V=v_side, K_ENCODE=k_encoder.encode, V_ENCODE=v_encoder.encode, STEP=step,
            PRECISION=exact_precision(), COUNTED=counter is not None, num_warps=4, **launch_options(fusion=False),
        )  # fmt: skip

    kind = (
        keys.shape, tails[0].shape, tails[1].shape[3], windows.sinks, windows.recent, windows.flush, counter is None,
        k_encoder.kind, v_encoder.kind, keys.dtype, tails[0].dtype, dtypes(fields[0], rope), dtypes(fields[1]),
    )  # fmt: skip
    repeated(write_slots_kernel, inputs, kind, complete, counts.device)
