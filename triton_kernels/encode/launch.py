"""Encode a run of tokens (a prompt, or tokens that leave a tail) in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import Field
from kvcache_compress.triton_kernels.common.codes import NewTile
from kvcache_compress.triton_kernels.common.operands import KernelEncoder, launch_options
from kvcache_compress.triton_kernels.common.plan import portable, repeated

FEW_TOKENS, MANY_TOKENS = 16, 32
"""Tokens per program: more of them read the rotation less often, but 64 would spill registers on an A100."""


@triton.jit(do_not_specialize=("s_b", "s_h", "s_t", "s_rope", "tokens"), do_not_specialize_on_alignment=("p_x",))
def encode_kernel(
    p_x, p_rope, fields, tables, s_b, s_h, s_t, s_rope, tokens,
    H: tl.constexpr, D: tl.constexpr, ENCODE: tl.constexpr, META: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Encode `BLOCK` of one head's `tokens`; `s_rope` is the stride of `p_rope` from one sequence to the next."""
    i_bh = tl.program_id(1).to(tl.int64)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_x = i_bh // H * s_b + i_bh % H * s_h + o_t.to(tl.int64) * s_t
    o_row = i_bh * tokens + o_t
    tile = NewTile(p_x, o_x, o_t < tokens, fields, o_row, p_rope + i_bh // H * s_rope, o_t, tables, i_bh % H)
    ENCODE(tile, D, META, PRECISION)


def encoded(
    encoder: KernelEncoder, x: torch.Tensor, stored: tuple[Field, ...], rope: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Encode `x` `[B, H, T, D]`, T a multiple of the group, into new tensors, laid out as `stored` describes.

    `rope` `[B, groups, 2 * rotary]`, contiguous, has cos and sin of the first token of each group.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, heads, tokens, dim = x.shape
    fields = tuple(
        x.new_empty(batch, heads, tokens // field.tokens, *field.shape, dtype=field.dtype) for field in stored
    )
    s_b, s_h, s_t, _ = x.stride()
    inputs = dict(
        p_x=x, fields=fields, tables=encoder.tables, s_b=s_b, s_h=s_h, s_t=s_t, tokens=tokens,
        **rope_inputs(rope, fields[0]),
    )  # fmt: skip

    def complete() -> tuple[tuple[int, int, int], dict[str, Any]]:
        block, warps = (MANY_TOKENS, 8) if tokens > MANY_TOKENS else (FEW_TOKENS, 4)
        block = max(block, encoder.group)
        return (-(-tokens // block), batch * heads, 1), dict(
            H=heads, D=dim, ENCODE=encoder.encode, META=encoder.meta, PRECISION=exact_precision(), BLOCK=block,
            num_warps=warps, **launch_options(fusion=False),
        )  # fmt: skip

    repeated(encode_kernel, inputs, (x.shape, x.dtype, encoder.kind, dtypes(fields, rope)), complete, x.device)
    return fields


def rope_inputs(rope: torch.Tensor | None, unread: torch.Tensor) -> dict[str, Any]:
    """Arguments with cos and sin `[B, groups, 2 * rotary]` for encoders; without any, a placeholder."""
    return {"p_rope": unread, "s_rope": 0} if rope is None else {"p_rope": rope, "s_rope": rope.stride(0)}


def dtypes(fields: tuple[torch.Tensor, ...], rope: torch.Tensor | None = None) -> tuple[torch.dtype, ...]:
    """Dtypes of a side's fields, and of its cos and sin if it has any."""
    return tuple([x.dtype for x in (fields if rope is None else (*fields, rope))])


def exact_precision() -> str:
    """`tl.dot` precision that loses nothing of float32 products; tensor cores of NVIDIA's GPUs add up three of TF32."""
    return "ieee" if portable() else "tf32x3"
