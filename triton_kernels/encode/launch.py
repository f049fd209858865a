"""Encoding a run of tokens straight into a side's fields, in one launch: of a prompt, or what leaves a tail."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import Field
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import AMD, repeated

FEW_TOKENS, MANY_TOKENS = 16, 32
"""Of a program: the more there are, the less often the rotation is read; 64 take more registers than an A100 has."""


@triton.jit(
    do_not_specialize=("s_b", "s_h", "s_t", "tokens", "at", "capacity"), do_not_specialize_on_alignment=("p_x",)
)
def encode_kernel(
    p_x, fields, tables, s_b, s_h, s_t, tokens, at, capacity,
    H: tl.constexpr, D: tl.constexpr, ENCODE: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`BLOCK` of the `tokens` of one head, which become tokens from `at` on of fields of `capacity` tokens."""
    i_bh = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_x = i_bh // H * s_b + i_bh % H * s_h + o_t.to(tl.int64) * s_t
    ENCODE(p_x, o_x, o_t < tokens, fields, i_bh * capacity + at + o_t, tables, i_bh % H, D, META, PRECISION)


@triton.jit(do_not_specialize=("tokens", "kept", "at", "capacity", "room", "next_room"))
def flush_kernel(
    p_x, p_next, p_good, fields, tables, tokens, kept, at, capacity, room, next_room,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ENCODE: tl.constexpr, META: tl.constexpr,
    PRECISION: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`BLOCK` tokens of one head's tail, a divisor of `tokens`: the first `tokens` are encoded, `kept` ones moved on.

    Tails have `room` and `next_room` tokens per head. `p_good` becomes 0 where a vector to be encoded is longer than
    `LONGEST`, or not finite.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    o_t, o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    o_x = (i_bh * room + o_t) * D
    m_x = (o_t < tokens + kept)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + o_x[:, None] + o_d[None, :], mask=m_x, other=0.0)
    if tl.program_id(0) * BLOCK < tokens:
        b_length = tl.sqrt(tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1))
        good = tl.min((b_length <= LONGEST).to(tl.int32), 0)
        tl.store(p_good, good, mask=good == 0)
        m_t = o_t < tokens
        ENCODE(p_x, o_x, m_t, fields, i_bh * capacity + at + o_t, tables, i_bh % H, D, META, PRECISION)
    else:
        o_next = (i_bh * next_room + o_t - tokens) * D
        tl.store(p_next + o_next[:, None] + o_d[None, :], b_x, mask=m_x)


def encode(encoder: KernelEncoder, x: torch.Tensor, fields: tuple[torch.Tensor, ...], at: int) -> None:
    """Encodes `x` `[B, H, T, D]`, whole groups, as tokens `[at, at + T)` of `fields`, all that a side stores.

    Fields are contiguous, the first has a row for each token of its capacity, `[B, H, capacity, *shape]`.
    """
    grid, inputs, constants = encode_arguments(encoder, x, fields, at)
    repeated(encode_kernel, grid, inputs, constants, x.device)


def encoded(encoder: KernelEncoder, x: torch.Tensor, stored: tuple[Field, ...]) -> tuple[torch.Tensor, ...]:
    """`x` `[B, H, T, D]` encoded to tensors of its own, `stored` says of what kind."""
    batch, heads, tokens, _ = x.shape
    fields = tuple(
        x.new_empty(batch, heads, tokens // field.tokens, *field.shape, dtype=field.dtype) for field in stored
    )
    encode(encoder, x, fields, 0)
    return fields


def flush(
    encoder: KernelEncoder, x: torch.Tensor, tokens: int, kept: int, fields: tuple[torch.Tensor, ...], at: int,
    following: torch.Tensor, good: torch.Tensor, longest: float,
) -> None:  # fmt: skip
    """Encodes the first `tokens` of a tail `x` `[B, H, room, D]`, whole groups and a multiple of 16; moves `kept` more.

    They become tokens `[at, at + tokens)` of `fields`, and the first ones of `following` `[B, H, room, D]`. `good`,
    int32, becomes 0 where a vector is not finite or longer than `longest`.
    """
    batch, heads, room, dim = x.shape
    block = max(FEW_TOKENS, encoder.group)
    inputs = dict(  # noqa: C408 - named as the kernel's parameters are
        p_x=x, p_next=following, p_good=good, fields=fields, tables=encoder.tables, tokens=tokens, kept=kept, at=at,
        capacity=fields[0].shape[2], room=room, next_room=following.shape[2],
    )  # fmt: skip
    constants = dict(
        H=heads, D=dim, D_PAD=next_power_of_2(dim), ENCODE=encoder.encode, META=encoder.meta,
        PRECISION=exact_precision(), LONGEST=longest, BLOCK=block,
        num_warps=4 if block <= MANY_TOKENS else 8, **launch_options(fusion=encoder.fused),
    )  # fmt: skip
    blocks = -(-(tokens + kept) // block)
    repeated(flush_kernel, (blocks, batch * heads, 1), inputs, constants, x.device)


def encode_arguments(
    encoder: KernelEncoder, x: torch.Tensor, fields: tuple[torch.Tensor, ...], at: int
) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]:
    """Grid of `encode_kernel`, its arguments that change from call to call, and its constants."""
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    s_b, s_h, s_t, _ = x.stride()
    inputs = dict(  # noqa: C408 - named as the kernel's parameters are
        p_x=x, fields=fields, tables=encoder.tables, s_b=s_b, s_h=s_h, s_t=s_t, tokens=tokens, at=at,
        capacity=fields[0].shape[2],
    )  # fmt: skip
    block, warps = (MANY_TOKENS, 8) if tokens > MANY_TOKENS else (FEW_TOKENS, 4)
    block = max(block, encoder.group)
    constants = dict(
        H=heads, D=dim, ENCODE=encoder.encode, META=encoder.meta, PRECISION=exact_precision(), BLOCK=block,
        num_warps=warps, **launch_options(fusion=encoder.fused),
    )  # fmt: skip
    return (-(-tokens // block), batch * heads, 1), inputs, constants


def exact_precision(amd: bool = AMD) -> str:
    """Of products of float32 numbers that lose nothing; the tensor cores of NVIDIA's GPUs make them of three."""
    return "ieee" if amd else "tf32x3"
