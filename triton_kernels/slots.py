"""A step of a layer of fixed capacity in one kernel: what leaves the recent window is encoded, new tokens are written.

A side whose method has no encoder for that is encoded by the layer, a few tokens in every step, and stored by a second
kernel. How many tokens there are is read from memory, so that a recorded CUDA graph can be replayed. Each program has
counters of its own: none is overwritten while another program may still read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .encode import exact_precision
from .operands import KernelEncoder, launch_options, next_power_of_2
from .plan import repeated

ROWS = tl.constexpr(16)
"""Tokens that leave the recent window, copied at a time."""
_STRIDES = tuple(f"s_{name}_{axis}" for name in ("k", "v") for axis in "bht")


@triton.jit
def _encode_side(
    p_ring, fields, tables, i_bh, i_h, packed, flushed, room, capacity, D: tl.constexpr, RING: tl.constexpr,
    FLUSH: tl.constexpr, ENCODE: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Encodes the tokens that are packed from this step on, if there are any: ring slots to rows of the store.

    They are `FLUSH` or none: no step has more tokens than that.
    """
    if flushed > packed:
        for start in range(0, FLUSH, BLOCK):
            o_token = packed + start + tl.arange(0, BLOCK)
            o_x = (i_bh * (RING + 1) + o_token % RING) * D
            m_t = (o_token < flushed) & (o_token < capacity)
            ENCODE(p_ring, o_x, m_t, fields, i_bh * room + o_token, tables, i_h, D, META, PRECISION)
        # Their slots may be overwritten now.
        tl.debug_barrier()


@triton.jit
def _write_side(
    p_x, p_sinks, p_ring, p_fault, s_b, s_h, s_t, i_b, i_h, length, room,
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    i_bh = i_b * H + i_h
    o_n, o_d = tl.arange(0, N_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    m_x = (o_n < N) & (o_d < D)
    b_x = tl.load(p_x + i_b * s_b + i_h * s_h + o_n * s_t + o_d, mask=m_x, other=0.0)
    o_token = length - SINKS + o_n
    tl.store(p_sinks + (i_bh * SINKS + length + o_n) * D + o_d, b_x, mask=m_x & (o_token < 0))
    p_ring += i_bh * (RING + 1) * D
    tl.store(p_ring + (o_token + SINKS * RING) % RING * D + o_d, b_x, mask=m_x & (o_token >= 0))
    b_length = tl.sqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1))
    fault = 1 - tl.min((b_length <= LONGEST).to(tl.int32), 0)
    fault = tl.where(length + N > room, 2, fault)
    tl.store(p_fault, tl.maximum(tl.load(p_fault), fault.to(tl.int64)))


@triton.jit
def _copy_leaving(
    p_ring, p_leaving, p_groups, i_bh, length, packed, capacity, N: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    SINKS: tl.constexpr, RING: tl.constexpr, RECENT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copies the tokens of the groups that a step may complete, and their numbers, for the layer to encode."""
    # A token may leave the window in the step in which it came.
    tl.debug_barrier()
    o_d = tl.arange(0, D_PAD)[None, :]
    GROUPS: tl.constexpr = (N - 1) // GROUP + 1
    # Triton rounds quotients towards zero: `BEFORE` groups more make them positive.
    BEFORE: tl.constexpr = (SINKS + RECENT) // GROUP + GROUPS + 1
    stop = length + N - SINKS - RECENT
    newest = (stop + BEFORE * GROUP) // GROUP - BEFORE - 1
    for start in tl.static_range(0, GROUPS * GROUP, ROWS):
        o_r = start + tl.arange(0, ROWS)[:, None]
        m_r = (o_r < GROUPS * GROUP) & (o_d < D)
        o_slot = ((newest - o_r // GROUP) * GROUP + o_r % GROUP + BEFORE * GROUP * RING) % RING
        b_r = tl.load(p_ring + (i_bh * (RING + 1) + o_slot) * D + o_d, mask=m_r)
        tl.store(p_leaving + (i_bh * GROUPS * GROUP + o_r) * D + o_d, b_r, mask=m_r)
    if i_bh == 0:
        for i in tl.static_range(GROUPS):
            first = (newest - i) * GROUP
            new = (first >= packed) & (first + GROUP > stop - N) & (first >= 0) & (first + GROUP <= capacity)
            tl.store(p_groups + i, tl.where(new, newest - i, capacity // GROUP))


@triton.jit(
    do_not_specialize=(*_STRIDES, "room", "capacity", "k_room", "v_room"),
    do_not_specialize_on_alignment=("p_k", "p_v", "p_total"),
)
def write_slots_kernel(
    p_k, p_v, p_k_sinks, p_v_sinks, p_k_ring, p_v_ring, p_k_leaving, p_v_leaving, p_k_groups, p_v_groups,
    k_fields, v_fields, k_tables, v_tables, p_counts, p_total, s_k_b, s_k_h, s_k_t, s_v_b, s_v_h, s_v_t,
    room, capacity, k_room, v_room,
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr, RECENT: tl.constexpr,
    FLUSH: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, K_ENCODE: tl.constexpr, V_ENCODE: tl.constexpr,
    K_META: tl.constexpr, V_META: tl.constexpr, PRECISION: tl.constexpr, LONGEST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`N` tokens of one head, the keys in programs `(·, 0)`, the values in programs `(·, 1)`, to sinks or ring.

    Before that, what is packed from now on is encoded, to fields with room for `k_room` and `v_room` tokens per head,
    where a side has an encoder; else, after that, the tokens that leave the recent window are copied to where they are
    encoded from, with the numbers of the groups that they are to be. Then the counters are raised; with `COUNT`
    `p_total` too.
    """
    i_p, programs = tl.program_id(0) * 2 + tl.program_id(1), tl.num_programs(0) * 2
    length, packed = tl.load(p_counts + i_p), tl.load(p_counts + programs + i_p)
    p_fault = p_counts + 2 * programs + i_p
    waiting = length - SINKS - packed - RECENT
    flushed = packed + tl.where(waiting > 0, waiting // FLUSH * FLUSH, 0)
    i_b, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    i_bh = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        if K_ENCODE is not None:
            _encode_side(
                p_k_ring, k_fields, k_tables, i_bh, i_h, packed, flushed, k_room, capacity, DK, RING, FLUSH,
                K_ENCODE, K_META, PRECISION, K_GROUP if K_GROUP > ROWS else ROWS,
            )  # fmt: skip
        _write_side(
            p_k, p_k_sinks, p_k_ring, p_fault, s_k_b, s_k_h, s_k_t, i_b, i_h, length, room,
            H, N, N_PAD, DK, DK_PAD, SINKS, RING, LONGEST,
        )  # fmt: skip
        if K_ENCODE is None:
            _copy_leaving(
                p_k_ring, p_k_leaving, p_k_groups, i_bh, length, flushed, capacity, N, DK, DK_PAD, SINKS, RING, RECENT,
                K_GROUP,
            )  # fmt: skip
    else:
        if V_ENCODE is not None:
            _encode_side(
                p_v_ring, v_fields, v_tables, i_bh, i_h, packed, flushed, v_room, capacity, DV, RING, FLUSH,
                V_ENCODE, V_META, PRECISION, V_GROUP if V_GROUP > ROWS else ROWS,
            )  # fmt: skip
        _write_side(
            p_v, p_v_sinks, p_v_ring, p_fault, s_v_b, s_v_h, s_v_t, i_b, i_h, length, room,
            H, N, N_PAD, DV, DV_PAD, SINKS, RING, LONGEST,
        )  # fmt: skip
        if V_ENCODE is None:
            _copy_leaving(
                p_v_ring, p_v_leaving, p_v_groups, i_bh, length, flushed, capacity, N, DV, DV_PAD, SINKS, RING, RECENT,
                V_GROUP,
            )  # fmt: skip
    # Every warp has read the counters.
    tl.debug_barrier()
    tl.store(p_counts + i_p, length + N)
    tl.store(p_counts + programs + i_p, flushed)
    if COUNT and i_p == 0:
        tl.store(p_total, length + N)


@triton.jit
def _store_side(
    fields, buffers, p_groups, i_bh, i_g, room, GROUPS: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr
):
    if i_g < GROUPS:
        group = tl.load(p_groups + i_g)
        for i in tl.static_range(len(SIZES)):
            for j in tl.static_range((SIZES[i] + BLOCK - 1) // BLOCK):
                o_x = j * BLOCK + tl.arange(0, BLOCK)
                m_x = o_x < SIZES[i]
                b_x = tl.load(fields[i] + (i_bh * GROUPS + i_g) * SIZES[i] + o_x, mask=m_x)
                tl.store(buffers[i] + (i_bh * room + group) * SIZES[i] + o_x, b_x, mask=m_x)


@triton.jit(do_not_specialize=("k_room", "v_room"))
def store_groups_kernel(
    k_new, v_new, k_fields, v_fields, p_k_groups, p_v_groups, k_room, v_room,
    K_GROUPS: tl.constexpr, V_GROUPS: tl.constexpr, K_SIZES: tl.constexpr, V_SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All fields of one group and head; keys in programs `(·, ·, 0)`, values in `(·, ·, 1)`.

    A field has `SIZES` numbers per group, and stores room for so many groups per head.
    """
    i_bh, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.program_id(2) == 0:
        _store_side(k_new, k_fields, p_k_groups, i_bh, i_g, k_room, K_GROUPS, K_SIZES, BLOCK)
    else:
        _store_side(v_new, v_fields, p_v_groups, i_bh, i_g, v_room, V_GROUPS, V_SIZES, BLOCK)


def write_slots(
    fresh: Sequence[torch.Tensor],
    sinks: Sequence[torch.Tensor],
    rings: Sequence[torch.Tensor],
    groups: Sequence[int],
    encoders: Sequence[KernelEncoder | None],
    fields: Sequence[tuple[torch.Tensor, ...]],
    counts: torch.Tensor,
    total: torch.Tensor | None,
    *,
    recent: int,
    flush: int,
    room: int,
    capacity: int,
    longest: float,
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Writes a step's keys and values `[B, H, n, D]` to `sinks` `[B, H, S, D]` and `rings` `[B, H, R + 1, D]`.

    Args:
        groups: tokens that each side encodes together.
        encoders: of sides that are encoded here, `flush` tokens once in so many, to `fields`, all that the side stores.
        counts: int64 `[3, 2 B H]`: of tokens, of packed tokens, all numbers of a row the same, and faults: 1 where
            something is not finite or longer than `longest`, 2 for more tokens than `room`.
        total: int64 `[]`, where the number of tokens is written too.
        capacity: packed tokens that there is room for.

    Returns:
        Of a side without an encoder the tokens to be encoded, `[B, H, groups * group, D]`, and the groups that they
        will be, int64; for what is none the one after the last.
    """
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in fresh)
    batch, heads, count, _ = keys.shape
    leaving: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for x, group, encoder in zip(rings, groups, encoders, strict=True):
        number = (count - 1) // group + 1
        if encoder is None:
            leaving.append((x.new_empty(batch, heads, number * group, x.shape[3]), counts.new_empty(number)))
        else:
            leaving.append(None)
    (k_leaving, k_groups), (v_leaving, v_groups) = (
        (x, counts) if copied is None else copied for x, copied in zip(rings, leaving, strict=True)
    )
    (k_encode, k_meta, k_tables), (v_encode, v_meta, v_tables) = (
        (None, (), (counts,)) if encoder is None else (encoder.encode, encoder.meta, encoder.tables)
        for encoder in encoders
    )
    s_k_b, s_k_h, s_k_t, _ = keys.stride()
    s_v_b, s_v_h, s_v_t, _ = values.stride()
    inputs = dict(  # noqa: C408 - named as the kernel's parameters are
        p_k=keys, p_v=values, p_k_sinks=sinks[0], p_v_sinks=sinks[1], p_k_ring=rings[0], p_v_ring=rings[1],
        p_k_leaving=k_leaving, p_v_leaving=v_leaving, p_k_groups=k_groups, p_v_groups=v_groups,
        k_fields=fields[0], v_fields=fields[1], k_tables=k_tables, v_tables=v_tables,
        p_counts=counts, p_total=counts if total is None else total,
        s_k_b=s_k_b, s_k_h=s_k_h, s_k_t=s_k_t, s_v_b=s_v_b, s_v_h=s_v_h, s_v_t=s_v_t, room=room, capacity=capacity,
        k_room=fields[0][0].shape[2], v_room=fields[1][0].shape[2],
    )  # fmt: skip
    dk, dv = keys.shape[3], values.shape[3]
    constants = dict(
        H=heads, N=count, N_PAD=next_power_of_2(count), DK=dk, DK_PAD=next_power_of_2(dk), DV=dv,
        DV_PAD=next_power_of_2(dv), SINKS=sinks[0].shape[2], RING=rings[0].shape[2] - 1, RECENT=recent, FLUSH=flush,
        K_GROUP=groups[0], V_GROUP=groups[1], K_ENCODE=k_encode, V_ENCODE=v_encode, K_META=k_meta, V_META=v_meta,
        PRECISION=exact_precision(), LONGEST=longest, COUNT=total is not None, num_warps=4,
        **launch_options(fusion=all(encoder is None or encoder.fused for encoder in encoders)),
    )  # fmt: skip
    repeated(write_slots_kernel, (batch * heads, 2, 1), inputs, constants, counts.device)
    return leaving


def store_groups(
    encoded: Sequence[tuple[torch.Tensor, ...]],
    buffers: Sequence[tuple[torch.Tensor, ...]],
    targets: Sequence[torch.Tensor],
    rooms: Sequence[int],
) -> None:
    """Writes encoded groups of both sides, or of one, as the groups `targets`, into fields with room for so many groups
    per head."""
    batch, heads = buffers[0][0].shape[:2]
    numbers = [len(x) for x in targets]
    sizes = [
        tuple(x.numel() // (batch * heads * number) for x in side)
        for side, number in zip(encoded, numbers, strict=True)
    ]
    new = [tuple(x.contiguous() for x in side) for side in encoded]
    # The last one twice, where there is but one: there are no programs for the second.
    inputs = dict(  # noqa: C408
        k_new=new[0], v_new=new[-1], k_fields=buffers[0], v_fields=buffers[-1], p_k_groups=targets[0],
        p_v_groups=targets[-1], k_room=rooms[0], v_room=rooms[-1],
    )  # fmt: skip
    constants = dict(
        K_GROUPS=numbers[0], V_GROUPS=numbers[-1], K_SIZES=sizes[0], V_SIZES=sizes[-1],
        BLOCK=min(1024, next_power_of_2(max(*sizes[0], *sizes[-1]))), num_warps=4, **launch_options(),
    )  # fmt: skip
    repeated(store_groups_kernel, (batch * heads, max(numbers), len(new)), inputs, constants, buffers[0][0].device)
