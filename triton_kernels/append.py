"""New keys and values into the tails of a layer, both in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .operands import AMD, launch_options, next_power_of_2
from .plan import Launch

_POINTERS = ("p_k", "p_v", "p_k_out", "p_v_out")
_STRIDES = tuple(f"s_{name}_{axis}" for name in ("k", "v", "ko", "vo") for axis in "bht")


@triton.jit
def _copy(p_from, p_to, s_b, s_h, s_t, s_ob, s_oh, s_ot, i_b, i_h, N: tl.constexpr, N_PAD: tl.constexpr,
          D: tl.constexpr, D_PAD: tl.constexpr):  # fmt: skip
    o_n, o_d = tl.arange(0, N_PAD)[:, None], tl.arange(0, D_PAD)[None, :]
    m_x = (o_n < N) & (o_d < D)
    b_x = tl.load(p_from + i_b * s_b + i_h * s_h + o_n * s_t + o_d, mask=m_x)
    tl.store(p_to + i_b * s_ob + i_h * s_oh + o_n * s_ot + o_d, b_x, mask=m_x)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_POINTERS)
def append_kernel(
    p_k, p_v, p_k_out, p_v_out,
    s_k_b, s_k_h, s_k_t, s_v_b, s_v_h, s_v_t, s_ko_b, s_ko_h, s_ko_t, s_vo_b, s_vo_h, s_vo_t,
    H: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """`N` tokens of one head; the keys in programs `(·, 0)`, the values in programs `(·, 1)`."""
    i_b, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    if tl.program_id(1) == 0:
        _copy(p_k, p_k_out, s_k_b, s_k_h, s_k_t, s_ko_b, s_ko_h, s_ko_t, i_b, i_h, N, N_PAD, DK, DK_PAD)
    else:
        _copy(p_v, p_v_out, s_v_b, s_v_h, s_v_t, s_vo_b, s_vo_h, s_vo_t, i_b, i_h, N, N_PAD, DV, DV_PAD)


_launches: dict[tuple[Any, ...], Launch] = {}


def append(keys: torch.Tensor, values: torch.Tensor, k_room: torch.Tensor, v_room: torch.Tensor) -> None:
    """Copies a step's `keys` and `values` `[B, H, n, D]` to where the tails have room for them, of any strides.

    Numbers of a head must lie side by side, and be of the tails' dtype.
    """
    inputs = append_inputs(keys, values, k_room, v_room)
    key = (keys.shape, values.shape[3], keys.dtype, values.dtype, keys.device)
    launch = _launches.get(key)
    if launch is None:
        grid = (keys.shape[0] * keys.shape[1], 2, 1)
        launch = _launches[key] = Launch(append_kernel, grid, append_arguments(inputs), inputs, repeat=not AMD)
    launch(inputs)


def append_inputs(*tensors: torch.Tensor) -> dict[str, Any]:
    """Pointers and strides of keys, values and the rooms for them, as `append_kernel` names them."""
    if any(x.stride(3) != 1 for x in tensors):
        raise ValueError(f"strides {[x.stride() for x in tensors]}: the numbers of a head must lie side by side")
    strides = (stride for x in tensors for stride in x.stride()[:3])
    return dict(zip(_POINTERS + _STRIDES, (*tensors, *strides), strict=True))


def append_arguments(inputs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of `append_kernel`."""
    _, heads, count, dim = inputs["p_k"].shape
    value_dim = inputs["p_v"].shape[3]
    return inputs | dict(
        H=heads, N=count, N_PAD=next_power_of_2(count), DK=dim, DK_PAD=next_power_of_2(dim), DV=value_dim,
        DV_PAD=next_power_of_2(value_dim), num_warps=1, **launch_options(),
    )  # fmt: skip
