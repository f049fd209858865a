"""Mask over slots for static layers, filled by the launch that maps the queries.

The twin of `Slots.mask`; `storage/shared/slots.py` says which token lies in which slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.storage.shared.slots import Slots
from kvcache_compress.triton_kernels.common.plan import KernelCall

from .query import CHUNK, map_query

CAUSAL, BOOL, FLOAT, PADDING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BLOCK = tl.constexpr(1024)
"""Slots per program."""


class MaskForm(NamedTuple):
    """Constants of a mask over slots: heads, queries, slots of each segment, and the kind of the mask over tokens."""

    heads: int
    count: int
    sinks: int
    packed_capacity: int
    tail_capacity: int
    kind: int


@triton.jit
def _slot_mask(
    p_mask, p_length, p_packed, p_out, s_b, s_h, s_n, s_t, tokens, i_s, i_n, i_h, i_b, FORM: tl.constexpr
):  # fmt: skip
    SINKS: tl.constexpr = FORM.sinks
    TAIL: tl.constexpr = FORM.tail_capacity
    KIND: tl.constexpr = FORM.kind
    TAIL_START: tl.constexpr = SINKS + FORM.packed_capacity
    length, packed = tl.load(p_length), tl.load(p_packed)
    SLOTS: tl.constexpr = TAIL_START + TAIL
    o_s = i_s * BLOCK + tl.arange(0, BLOCK)
    m_s = o_s < SLOTS
    newest = length - SINKS - 1
    # Positions after the sinks; `SINKS + 1` extra turns of the tail keep the dividend positive.
    o_tail = newest - (newest - (o_s - TAIL_START) + (SINKS + 1) * TAIL) % TAIL
    m_tail = o_s >= TAIL_START
    o_t = tl.where(m_tail, o_tail + SINKS, o_s)
    BY_POSITION: tl.constexpr = KIND != BOOL and KIND != FLOAT
    holds = tl.where(o_s < SINKS, o_s < length, tl.where(m_tail, o_tail >= packed, o_s - SINKS < packed))
    if BY_POSITION:
        holds = holds & (o_t <= length - FORM.count + i_n)
    p_out += ((i_b.to(tl.int64) * FORM.heads + i_h) * FORM.count + i_n) * SLOTS
    if KIND == CAUSAL:
        tl.store(p_out + o_s, holds.to(tl.uint8), mask=m_s)
    else:
        o_m = tl.minimum(tl.maximum(o_t, 0), tokens - 1)
        p_mask += i_b.to(tl.int64) * s_b + i_h.to(tl.int64) * s_h + i_n.to(tl.int64) * s_n
        b_mask = tl.load(p_mask + o_m * s_t, mask=m_s & holds, other=0)
        if KIND == FLOAT:
            tl.store(p_out + o_s, tl.where(holds, b_mask, float("-inf")), mask=m_s)
        else:
            tl.store(p_out + o_s, (holds & (b_mask != 0)).to(tl.uint8), mask=m_s)


@triton.jit(
    do_not_specialize=("s_token_b", "s_token_h", "s_token_n", "s_token_t", "tokens"),
    do_not_specialize_on_alignment=("p_token_mask",),
)
def map_step_kernel(
    p_q, p_map, p_bound, p_mapped, p_rows, s_map, scaling, rows, heads,
    p_token_mask, p_length, p_packed, p_mask, s_token_b, s_token_h, s_token_n, s_token_t, tokens,
    MAPPING: tl.constexpr, MAPS: tl.constexpr, ROW_BLOCKS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Map queries in the first `MAPS` programs, as `map_query_kernel`; fill a mask over slots in the others."""
    i = tl.program_id(0)
    if i < MAPS:
        CHUNKS: tl.constexpr = MAPPING.width // CHUNK
        map_query(
            p_q, p_map, p_bound, p_mapped, p_rows, s_map, scaling, rows, heads,
            i % CHUNKS, i // CHUNKS % ROW_BLOCKS, (i // (CHUNKS * ROW_BLOCKS)).to(tl.int64), MAPPING,
        )  # fmt: skip
    else:
        i -= MAPS
        BLOCKS: tl.constexpr = (FORM.sinks + FORM.packed_capacity + FORM.tail_capacity + BLOCK - 1) // BLOCK
        i_bh = i // (BLOCKS * FORM.count)
        _slot_mask(
            p_token_mask, p_length, p_packed, p_mask, s_token_b, s_token_h, s_token_n, s_token_t, tokens,
            i % BLOCKS, i // BLOCKS % FORM.count, i_bh % FORM.heads, i_bh // FORM.heads, FORM,
        )  # fmt: skip


class SlotMask:
    """Mask over slots for a query, filled by `map_step_kernel` from a mask over tokens as `Slots.mask` takes it."""

    def __init__(self, mask: torch.Tensor | None, query: torch.Tensor, slots: Slots) -> None:
        self.slots = slots
        self.kind: int = CAUSAL.value
        batch, heads, dtype = 1, 1, torch.bool
        token_mask, (s_b, s_h, s_n, s_t), tokens = slots.length, (0, 0, 0, 0), 0
        if mask is not None:
            batch, tokens = mask.shape[0], mask.shape[-1]
            if mask.ndim == 4:
                mask = mask.expand(-1, -1, query.shape[2], -1)
            token_mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
            if mask.ndim == 2:
                (s_b, s_t), self.kind = mask.stride(), PADDING.value
            else:
                heads, dtype = mask.shape[1], mask.dtype
                (s_b, s_h, s_n, s_t), self.kind = mask.stride(), (BOOL if dtype == torch.bool else FLOAT).value
        number = slots.sinks + slots.packed_capacity + slots.tail_capacity
        self.tensor = query.new_empty(batch, heads, query.shape[2], number, dtype=dtype)
        """The mask to be filled, `[B or 1, Hq or 1, n, slots]`."""
        self.inputs = dict(  # noqa: C408 - named as the kernel's parameters are
            p_token_mask=token_mask, p_length=slots.length,
            s_token_b=s_b, s_token_h=s_h, s_token_n=s_n, s_token_t=s_t, tokens=tokens,
        )  # fmt: skip
        self.key = (
            self.kind, token_mask.dtype, token_mask.device, self.tensor.shape,
            slots.sinks, slots.packed_capacity, slots.tail_capacity,
        )  # fmt: skip

    def call(self, grid: tuple[int, int, int], mapping: dict[str, Any], inputs: dict[str, Any]) -> KernelCall:
        """Launch of `map_step_kernel` in place of `map_query_kernel` with this grid and arguments `mapping`.

        `inputs` are the changing arguments of `attend_kernel`.
        """
        chunks, row_blocks, pairs = grid
        batch, heads, count, number = self.tensor.shape
        blocks = -(-number // BLOCK.value)
        maps = chunks * row_blocks * pairs
        form = MaskForm(heads, count, self.slots.sinks, self.slots.packed_capacity, self.slots.tail_capacity, self.kind)
        arguments = mapping | self.inputs | {name: inputs[name] for name in ("p_packed", "p_mask")}
        arguments |= {"MAPS": maps, "ROW_BLOCKS": row_blocks, "FORM": form}
        return map_step_kernel, (maps + blocks * count * heads * batch, 1, 1), arguments
