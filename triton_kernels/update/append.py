"""Append a step's new keys and values to the tails of a layer, both in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.operands import launch_options, next_power_of_2
from kvcache_compress.triton_kernels.common.plan import repeated

_MOVING = (*(f"s_{name}_{axis}" for name in ("k", "v") for axis in "bht"), "k_capacity", "v_capacity", "at")


@triton.jit
def _copy(p_from, p_to, s_b, s_h, s_t, capacity, at, i_b, i_h, H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr,
          D: tl.constexpr, D_PAD: tl.constexpr):  # fmt: skip
    o_n, o_d = tl.arange(0, N_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    m_x = (o_n < N) & (o_d < D)
    b_x = tl.load(p_from + i_b * s_b + i_h * s_h + o_n * s_t + o_d, mask=m_x)
    tl.store(p_to + ((i_b * H + i_h) * capacity + at + o_n) * D + o_d, b_x, mask=m_x)


@triton.jit(do_not_specialize=_MOVING, do_not_specialize_on_alignment=("p_k", "p_v", "p_k_out", "p_v_out"))
def append_kernel(
    p_k, p_v, p_k_out, p_v_out, s_k_b, s_k_h, s_k_t, s_v_b, s_v_h, s_v_t, k_capacity, v_capacity, at,
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Copy `N` tokens of one head: keys in programs `(·, 0)`, values in programs `(·, 1)`."""
    i_b, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    if tl.program_id(1) == 0:
        _copy(p_k, p_k_out, s_k_b, s_k_h, s_k_t, k_capacity, at, i_b, i_h, H, N, N_PAD, DK, DK_PAD)
    else:
        _copy(p_v, p_v_out, s_v_b, s_v_h, s_v_t, v_capacity, at, i_b, i_h, H, N, N_PAD, DV, DV_PAD)


def append(keys: torch.Tensor, values: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, at: int) -> None:
    """Copy a step's `keys` and `values` `[B, H, n, D]` to tokens `[at, at + n)` of buffers `[B, H, capacity, D]`.

    The last dimension of keys and values has stride 1. Buffers are contiguous, in the dtypes of keys and values.
    """
    s_k_b, s_k_h, s_k_t, _ = keys.stride()
    s_v_b, s_v_h, s_v_t, _ = values.stride()
    inputs = dict(  # noqa: C408 - named as the kernel's parameters are
        p_k=keys, p_v=values, p_k_out=k_buffer, p_v_out=v_buffer,
        s_k_b=s_k_b, s_k_h=s_k_h, s_k_t=s_k_t, s_v_b=s_v_b, s_v_h=s_v_h, s_v_t=s_v_t,
        k_capacity=k_buffer.shape[2], v_capacity=v_buffer.shape[2], at=at,
    )  # fmt: skip

    def complete() -> tuple[tuple[int, int, int], dict[str, Any]]:
        (batch, heads, count, dim), value_dim = keys.shape, values.shape[3]
        return (batch * heads, 2, 1), dict(
            H=heads, N=count, N_PAD=next_power_of_2(count), DK=dim, DK_PAD=next_power_of_2(dim), DV=value_dim,
            DV_PAD=next_power_of_2(value_dim), num_warps=1, **launch_options(),
        )  # fmt: skip

    kind = keys.shape, values.shape[3], keys.dtype, values.dtype
    repeated(append_kernel, inputs, kind, complete, keys.device)
