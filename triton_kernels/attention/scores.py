"""Score packed tokens in a launch before attention, for keys that need the registers for themselves (CommVQ).

A program scores one part of the keys, such as a half of their channels, of `PROGRAM_TOKENS` tokens of a head, for all
its query rows. `attend_kernel` adds up the parts where it would score tokens itself (`kernel.load_scores`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.operands import FEW_ROWS, KernelSide
from kvcache_compress.triton_kernels.common.plan import KernelCall

from .kernel import FIELDS, query_tile

BLOCK = 128
"""Tokens per tile: as many as sums in float32 leave room for in the registers of eight warps, two programs a time."""
PROGRAM_TOKENS = 512
"""Tokens per program."""
REGISTERS = 128
"""Registers per thread: two programs of eight warps on a multiprocessor."""


@triton.jit(do_not_specialize=("n_packed", "k_capacity", "rope_capacity"))
def scores_kernel(
    p_mapped, keys, tables, p_rope, p_packed, p_scores, n_packed, k_capacity, rope_capacity, n_rows,
    SCORE: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Score a part of the keys, `p_scores[part, b, h, t, row] = SCORE(q', fields, part)`.

    SCORE: `(b_q, fields, tables, p_rope, i_part, i_h, s_head, o_row, o_t, m_t, META, PRECISION, FAST)`, with two query
    tiles; the rest is as in `attend_kernel`.
    """
    i_part, i_h, i_b = tl.program_id(1) % K.parts, tl.program_id(1) // K.parts, tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // K.parts
    i_bh = i_b * heads + i_h
    if BOUNDED:
        n_packed = tl.minimum(n_packed, tl.load(p_packed).to(tl.int32))
    first = tl.program_id(0) * TOKENS
    stop = tl.minimum(first + TOKENS, n_packed)
    WIDTH: tl.constexpr = K.widths[0]
    META: tl.constexpr = K.meta
    o_row = tl.arange(0, M // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    p_q = p_mapped + i_bh * n_rows * K.width + i_part * (2 * WIDTH)
    b_re = query_tile(p_q, o_row * K.width, o_row < n_rows, WIDTH)
    b_im = query_tile(p_q + WIDTH, o_row * K.width, o_row < n_rows, WIDTH)
    o_r, o_t = tl.arange(0, M), tl.arange(0, BLOCK)
    p_rope += i_b * rope_capacity * K.rope
    p_scores += (i_part.to(tl.int64) * tl.num_programs(2) * heads + i_bh) * k_capacity * n_rows + o_r[None, :]
    for start in range(first, stop, BLOCK):
        # Where there is no token, the last one is scored again, so that no load needs a mask.
        o_near = tl.minimum(o_t, stop - 1 - start)
        b_s = SCORE(
            (b_re, b_im), keys[FIELDS:], tables, p_rope + start * K.rope, i_part, i_h, k_capacity,
            i_bh * k_capacity + start, o_near, tl.full([BLOCK], True, tl.int1), META, PRECISION, FAST,
        )  # fmt: skip
        m_s = (start + o_t < stop)[:, None] & (o_r < n_rows)[None, :]
        tl.store(p_scores + (start + o_t)[:, None] * n_rows, b_s, mask=m_s)


def scores_call(
    side: KernelSide, mapped: dict[str, Any], inputs: dict[str, Any], *, rope: int, bounded: bool, fast: bool
) -> KernelCall:
    """Launch of `scores_kernel` for the queries of `map_query_kernel`, its result `p_scores` included.

    Args:
        side: the keys' form for few rows.
        mapped: arguments of `map_query_kernel`, results included.
        inputs: the changing arguments of `attend_kernel`.
        rope: numbers of cos and sin per token.
        bounded: True if the number of packed tokens is in memory.
        fast: as `FAST` of `attend_kernel`.
    """
    batch, heads, rows, _ = mapped["p_mapped"].shape
    capacity = inputs["k_capacity"]
    tables, form = side.operands(torch.float16, fast, mapped["p_q"].shape[-1], rope)
    arguments = {name: inputs[name] for name in ("keys", "p_rope", "p_packed", "n_packed", "k_capacity")}
    arguments |= dict(  # noqa: C408 - named as the kernel's parameters are
        p_mapped=mapped["p_mapped"], tables=tables, rope_capacity=inputs["rope_capacity"], n_rows=rows,
        p_scores=mapped["p_rows"].new_empty(side.parts, batch, heads, capacity, rows),
        SCORE=side.score, K=form, M=FEW_ROWS, BLOCK=BLOCK, TOKENS=PROGRAM_TOKENS, BOUNDED=bounded,
        PRECISION="tf32", FAST=fast, num_warps=8, num_stages=2, maxnreg=REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    return scores_kernel, (-(-capacity // PROGRAM_TOKENS), side.parts * heads, batch), arguments
