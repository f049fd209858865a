"""One step of a static layer: encode the tokens that leave the recent window and write the new ones.

One kernel does both. Without a kernel encoder for a side's method, the layer encodes a few tokens of that side in every
step, and a second kernel stores them. The number of tokens is read from memory, so a recorded CUDA graph can be
replayed. Each program has its own counters: none is overwritten while another program may still read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.operands import KernelEncoder, launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import repeated
from kvcache_compress.triton_kernels.encode.launch import exact_precision, rope_inputs

ROWS = tl.constexpr(16)
"""Tokens leaving the recent window that are copied at a time."""
_STRIDES = tuple(f"s_{name}_{axis}" for name in ("k", "v") for axis in "bht")
SINKS, TAIL, LEAVING, GROUPS, FIELDS = (tl.constexpr(place) for place in range(5))
"""Indices into a side's memory: sinks, tail, outputs for leaving tokens and for their group numbers, fields."""


class SlotSide(NamedTuple):
    """Constants of a side: head dimension, the same padded, tokens encoded together, constants of the encoder."""

    dim: int
    padded: int
    group: int
    meta: tuple[Any, ...]


class Step(NamedTuple):
    """Constants of a step: heads, new tokens, the same padded, slots of sinks, slots of the tail.

    recent: tokens of the recent window; flush: tokens encoded at a time; longest: length of the longest vector allowed.
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
def _encode_side(
    memory, tables, p_rope, i_bh, i_h, packed, flushed, rows, packed_capacity,
    SIDE: tl.constexpr, STEP: tl.constexpr, ENCODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Encode the tokens that are packed from this step on, if any: tail slots to rows of the store.

    They are `STEP.flush` or none, as no step has more tokens than that.
    """
    META: tl.constexpr = SIDE.meta
    BLOCK: tl.constexpr = SIDE.group if SIDE.group > ROWS else ROWS
    if flushed > packed:
        for start in range(0, STEP.flush, BLOCK):
            o_token = packed + start + tl.arange(0, BLOCK)
            o_x = (i_bh * (STEP.tail + 1) + o_token % STEP.tail) * SIDE.dim
            m_t = (o_token < flushed) & (o_token < packed_capacity)
            o_row = i_bh * rows + o_token
            ENCODE(
                memory[TAIL], o_x, m_t, memory[FIELDS:], o_row, p_rope, o_token, tables, i_h, SIDE.dim, META, PRECISION
            )
        # From here on their slots may be overwritten.
        tl.debug_barrier()


@triton.jit
def _write_side(
    p_x, memory, p_fault, s_b, s_h, s_t, i_b, i_h, length, capacity, SIDE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    i_bh = i_b * STEP.heads + i_h
    o_n, o_d = tl.arange(0, STEP.padded)[:, None], tl.arange(0, SIDE.padded)[None, :]
    m_x = (o_n < STEP.count) & (o_d < SIDE.dim)
    b_x = tl.load(p_x + i_b * s_b + i_h * s_h + o_n * s_t + o_d, mask=m_x, other=0.0)
    o_token = length - STEP.sinks + o_n
    p_sinks = memory[SINKS] + (i_bh * STEP.sinks + length + o_n) * SIDE.dim
    tl.store(p_sinks + o_d, b_x, mask=m_x & (o_token < 0))
    p_tail = memory[TAIL] + i_bh * (STEP.tail + 1) * SIDE.dim
    o_slot = (o_token + STEP.sinks * STEP.tail) % STEP.tail
    tl.store(p_tail + o_slot * SIDE.dim + o_d, b_x, mask=m_x & (o_token >= 0))
    b_length = tl.sqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1))
    fault = 1 - tl.min((b_length <= STEP.longest).to(tl.int32), 0)
    fault = tl.where(length + STEP.count > capacity, 2, fault)
    tl.store(p_fault, fault.to(tl.int64), mask=fault > 0)


@triton.jit
def _copy_leaving(memory, i_bh, length, packed, packed_capacity, SIDE: tl.constexpr, STEP: tl.constexpr):
    """Copy the tokens of the groups that a step may complete, and the groups' numbers, for the layer to encode."""
    # A token may leave the window in the step that brought it.
    tl.debug_barrier()
    o_d = tl.arange(0, SIDE.padded)[None, :]
    GROUP: tl.constexpr = SIDE.group
    COUNT: tl.constexpr = (STEP.count - 1) // GROUP + 1
    DENSE: tl.constexpr = STEP.sinks + STEP.recent
    # Triton rounds quotients towards zero: `BEFORE` extra groups keep them positive.
    BEFORE: tl.constexpr = DENSE // GROUP + COUNT + 1
    stop = length + STEP.count - DENSE
    newest = (stop + BEFORE * GROUP) // GROUP - BEFORE - 1
    for start in tl.static_range(0, COUNT * GROUP, ROWS):
        o_r = start + tl.arange(0, ROWS)[:, None]
        m_r = (o_r < COUNT * GROUP) & (o_d < SIDE.dim)
        o_slot = ((newest - o_r // GROUP) * GROUP + o_r % GROUP + BEFORE * GROUP * STEP.tail) % STEP.tail
        b_r = tl.load(memory[TAIL] + (i_bh * (STEP.tail + 1) + o_slot) * SIDE.dim + o_d, mask=m_r)
        tl.store(memory[LEAVING] + (i_bh * COUNT * GROUP + o_r) * SIDE.dim + o_d, b_r, mask=m_r)
    if i_bh == 0:
        for i in tl.static_range(COUNT):
            first = (newest - i) * GROUP
            new = (
                (first >= packed)
                & (first + GROUP > stop - STEP.count)
                & (first >= 0)
                & (first + GROUP <= packed_capacity)
            )
            tl.store(memory[GROUPS] + i, tl.where(new, newest - i, packed_capacity // GROUP))


@triton.jit
def _step_side(
    p_x, memory, tables, p_rope, p_fault, s_b, s_h, s_t, i_b, i_h, length, packed, flushed, capacity, packed_capacity,
    rows,
    SIDE: tl.constexpr, STEP: tl.constexpr, ENCODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_bh = i_b * STEP.heads + i_h
    if ENCODE is not None:
        _encode_side(
            memory, tables, p_rope, i_bh, i_h, packed, flushed, rows, packed_capacity, SIDE, STEP, ENCODE, PRECISION
        )  # fmt: skip
    _write_side(p_x, memory, p_fault, s_b, s_h, s_t, i_b, i_h, length, capacity, SIDE, STEP)
    if ENCODE is None:
        _copy_leaving(memory, i_bh, length, flushed, packed_capacity, SIDE, STEP)


@triton.jit(
    do_not_specialize=(*_STRIDES, "s_rope", "capacity", "packed_capacity", "k_rows", "v_rows"),
    do_not_specialize_on_alignment=("p_k", "p_v", "p_total"),
)
def write_slots_kernel(
    p_k, p_v, p_rope, keys, values, k_tables, v_tables, p_counts, p_total, s_k_b, s_k_h, s_k_t, s_v_b, s_v_h, s_v_t,
    s_rope, capacity, packed_capacity, k_rows, v_rows,
    K: tl.constexpr, V: tl.constexpr, K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Write a step's tokens of one head to sinks or tail: keys in programs `(·, 0)`, values in programs `(·, 1)`.

    `keys` and `values` are each side's memory, from `SINKS` to `FIELDS`. A side with an encoder first encodes what is
    packed from this step on, into fields of `k_rows` or `v_rows` tokens per head. A side without one, after writing,
    copies the tokens that leave the recent window to `LEAVING` and the numbers of their groups to `GROUPS`. Last, the
    counters rise, with `COUNTED` also `p_total`. `capacity` is the number of tokens that the layer may hold.
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


class EncodedGroups(NamedTuple):
    """Constants of a side's encoded groups: their count, and the numbers of a group in each field."""

    count: int
    sizes: tuple[int, ...]


@triton.jit
def _store_side(memory, i_bh, i_g, rows, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Store one group of one head; `memory` is the groups' numbers, their fields, and the side's stored fields."""
    COUNT: tl.constexpr = len(SIDE.sizes)
    if i_g < SIDE.count:
        group = tl.load(memory[0] + i_g)
        for i in tl.static_range(COUNT):
            for j in tl.static_range((SIDE.sizes[i] + BLOCK - 1) // BLOCK):
                o_x = j * BLOCK + tl.arange(0, BLOCK)
                m_x = o_x < SIDE.sizes[i]
                b_x = tl.load(memory[1 + i] + (i_bh * SIDE.count + i_g) * SIDE.sizes[i] + o_x, mask=m_x)
                tl.store(memory[1 + COUNT + i] + (i_bh * rows + group) * SIDE.sizes[i] + o_x, b_x, mask=m_x)


@triton.jit(do_not_specialize=("k_rows", "v_rows"))
def store_groups_kernel(
    keys, values, k_rows, v_rows, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store all fields of one group and head: keys in programs `(·, ·, 0)`, values in `(·, ·, 1)`.

    `k_rows` and `v_rows` are the groups per head that the stores hold.
    """
    i_bh, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.program_id(2) == 0:
        _store_side(keys, i_bh, i_g, k_rows, K, BLOCK)
    else:
        _store_side(values, i_bh, i_g, v_rows, V, BLOCK)


def write_slots(
    fresh: Sequence[torch.Tensor],
    sinks: Sequence[torch.Tensor],
    tails: Sequence[torch.Tensor],
    groups: Sequence[int],
    encoders: Sequence[KernelEncoder | None],
    fields: Sequence[tuple[torch.Tensor, ...]],
    counts: torch.Tensor,
    total: torch.Tensor | None,
    *,
    recent: int,
    flush: int,
    capacity: int,
    packed_capacity: int,
    longest: float,
    rope: torch.Tensor | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Write a step's keys and values `[B, H, n, D]` to `sinks` `[B, H, S, D]` and `tails` `[B, H, R + 1, D]`.

    Args:
        groups: tokens that each side encodes together.
        encoders: kernel encoders of the sides that have one; they encode `flush` tokens at a time.
        fields: all stored fields of each side.
        counts: int64 `[3, 2 B H]`: tokens, packed tokens (equal within a row), and faults: 1 if a vector is not finite
            or longer than `longest`, 2 if there are more tokens than `capacity`.
        total: int64 `[]`, also receives the number of tokens.
        capacity: tokens that the layer may hold.
        packed_capacity: packed tokens that the layer may hold.
        rope: cos and sin `[B, groups, 2 * rotary]` of the first token of each packed group, for encoders that use them.

    Returns:
        For each side without an encoder, the tokens to encode `[B, H, groups * group, D]` and the int64 numbers of
        their groups; a group that is not complete has the number after the last. None for sides with an encoder.
    """
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in fresh)
    batch, heads, count, _ = keys.shape
    leaving: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for x, group, encoder in zip(tails, groups, encoders, strict=True):
        number = (count - 1) // group + 1
        if encoder is None:
            leaving.append((x.new_empty(batch, heads, number * group, x.shape[3]), counts.new_empty(number)))
        else:
            leaving.append(None)
    # A side without an encoder reads no tables, and one with an encoder copies nothing: both get placeholders.
    (k_memory, k_tables, k_encode, k_side), (v_memory, v_tables, v_encode, v_side) = (
        _side_operands(tail.shape[3], group, encoder, (sink, tail, *(copied or (tail, counts)), *stored), counts)
        for sink, tail, group, encoder, copied, stored in zip(
            sinks, tails, groups, encoders, leaving, fields, strict=True
        )
    )
    s_k_b, s_k_h, s_k_t, _ = keys.stride()
    s_v_b, s_v_h, s_v_t, _ = values.stride()
    inputs = dict(
        p_k=keys, p_v=values, keys=k_memory, values=v_memory, k_tables=k_tables, v_tables=v_tables,
        p_counts=counts, p_total=counts if total is None else total,
        s_k_b=s_k_b, s_k_h=s_k_h, s_k_t=s_k_t, s_v_b=s_v_b, s_v_h=s_v_h, s_v_t=s_v_t, capacity=capacity,
        packed_capacity=packed_capacity, k_rows=fields[0][0].shape[2], v_rows=fields[1][0].shape[2],
        **rope_inputs(rope, fields[0][0]),
    )  # fmt: skip
    step = Step(
        heads, count, next_power_of_2(count), sinks[0].shape[2], tails[0].shape[2] - 1, recent, flush, longest
    )  # fmt: skip
    constants = dict(
        K=k_side, V=v_side, K_ENCODE=k_encode, V_ENCODE=v_encode, STEP=step, PRECISION=exact_precision(),
        COUNTED=total is not None, num_warps=4, **launch_options(fusion=False),
    )  # fmt: skip
    repeated(write_slots_kernel, (batch * heads, 2, 1), inputs, constants, counts.device)
    return leaving


def _side_operands(
    dim: int, group: int, encoder: KernelEncoder | None, memory: tuple[torch.Tensor, ...], unread: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], Any, SlotSide]:
    """Memory, tables, encoder and constants of a side, as `write_slots_kernel` takes them."""
    padded = next_power_of_2(dim)
    if encoder is None:
        return memory, (unread,), None, SlotSide(dim, padded, group, ())
    return memory, encoder.tables, encoder.encode, SlotSide(dim, padded, encoder.group, encoder.meta)


def store_groups(
    encoded: Sequence[tuple[torch.Tensor, ...]],
    buffers: Sequence[tuple[torch.Tensor, ...]],
    targets: Sequence[torch.Tensor],
    capacities: Sequence[int],
) -> None:
    """Write encoded groups of one or both sides as groups `targets` of fields with `capacities` groups per head."""
    batch, heads = buffers[0][0].shape[:2]
    numbers = [len(x) for x in targets]
    sizes = [
        tuple(x.numel() // (batch * heads * number) for x in side)
        for side, number in zip(encoded, numbers, strict=True)
    ]
    memory = [
        (target, *(x.contiguous() for x in side), *stored)
        for target, side, stored in zip(targets, encoded, buffers, strict=True)
    ]
    # A single side is passed twice; no program handles the second.
    inputs = dict(keys=memory[0], values=memory[-1], k_rows=capacities[0], v_rows=capacities[-1])  # noqa: C408
    constants = dict(
        K=EncodedGroups(numbers[0], sizes[0]), V=EncodedGroups(numbers[-1], sizes[-1]),
        BLOCK=min(1024, next_power_of_2(max(*sizes[0], *sizes[-1]))), num_warps=4, **launch_options(),
    )  # fmt: skip
    repeated(store_groups_kernel, (batch * heads, max(numbers), len(memory)), inputs, constants, buffers[0][0].device)
