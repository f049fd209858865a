"""Search for CommVQ's codes: greedy residual rounds for keys and values, twins of those in `additive.py`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.operands import launch_options
from kvcache_compress.triton_kernels.decode.commvq import load_part


@triton.jit
def complex_point(p_rows, b_a, b_b, o_j, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Points `c[a] + i c[b]` of one round, real and imaginary parts `[T, padded]`."""
    b_re = load_part(p_rows, b_a, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_im = load_part(p_rows + PAIRS, b_a, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_re -= load_part(p_rows + PAIRS, b_b, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_im += load_part(p_rows, b_b, o_j, PAIRS, 2 * PAIRS, DTYPE)
    return b_re, b_im


@triton.jit
def place(p_places, i_g, GROUPS: tl.constexpr):
    """Rounds of group `i_g` of all heads' groups, and its first book; `p_places` is `ResidualBooks.places`."""
    p_head = p_places + i_g // GROUPS * 3
    n_rounds = tl.load(p_head + 1)
    return n_rounds, tl.load(p_head) + i_g % GROUPS * n_rounds


@triton.jit(do_not_specialize=("N", "MOST"))
def complex_search_kernel(
    p_z, p_rows, p_pairs, p_places, p_index, N, MOST,
    GROUPS: tl.constexpr, CENTRES: tl.constexpr, PAIRS: tl.constexpr,
    C_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Greedy residual codes of `BLOCK` vectors of one group: each round picks the (a, b) that minimises

        (|c_a|² + |c_b|² + 2<c_a, i c_b>) - 2<z, i c_b> - 2<z, c_a>,

    the parenthesis from the table `p_pairs` `[S, N, N]`; as `additive.complex_encode`, without its N² distances.
    `p_z` becomes the residual; it is read in parts, as holding all of it would spill registers.
    """
    i_g = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_c = tl.arange(0, C_PAD)
    m_c = o_c < CENTRES
    p_z += i_g.to(tl.int64) * N * (2 * PAIRS)
    n_rounds, i_book = place(p_places, i_g, GROUPS)
    p_rows += i_book * (CENTRES * 2 * PAIRS)
    p_pairs += i_book * (CENTRES * CENTRES)
    p_index += i_g.to(tl.int64) * N * MOST
    o_z = o_n[:, None] * (2 * PAIRS)
    for i_r in range(n_rounds):
        b_first = tl.zeros([BLOCK, C_PAD], tl.float32)
        b_second = tl.zeros([BLOCK, C_PAD], tl.float32)
        for start in range(0, PAIRS, 16):
            o_j = start + tl.arange(0, 16)
            m_z = m_n[:, None] & (o_j < PAIRS)[None, :]
            b_re = tl.load(p_z + o_z + 2 * o_j[None, :], mask=m_z, other=0.0)
            b_im = tl.load(p_z + o_z + 2 * o_j[None, :] + 1, mask=m_z, other=0.0)
            o_x = o_c[None, :] * (2 * PAIRS) + o_j[:, None]
            m_x = m_c[None, :] & (o_j < PAIRS)[:, None]
            b_x = tl.load(p_rows + o_x, mask=m_x, other=0.0).to(tl.float32)
            b_y = tl.load(p_rows + o_x + PAIRS, mask=m_x, other=0.0).to(tl.float32)
            b_first = tl.dot(b_re, b_x, b_first, input_precision="ieee")
            b_first = tl.dot(b_im, b_y, b_first, input_precision="ieee")
            b_second = tl.dot(b_im, b_x, b_second, input_precision="ieee")
            b_second = tl.dot(-b_re, b_y, b_second, input_precision="ieee")
        b_best = tl.full([BLOCK], float("inf"), tl.float32)
        b_a = tl.zeros([BLOCK], tl.int32)
        for i_a in range(CENTRES):
            b_pairs = tl.load(p_pairs + i_a * CENTRES + o_c, mask=m_c, other=float("inf"))
            b_least = tl.min(b_pairs[None, :] - 2 * b_second, 1)
            b_least -= 2 * tl.sum(tl.where((o_c == i_a)[None, :], b_first, 0.0), 1)
            b_a = tl.where(b_least < b_best, i_a, b_a)
            b_best = tl.minimum(b_least, b_best)
        b_row = tl.load(p_pairs + b_a[:, None] * CENTRES + o_c[None, :], mask=m_c[None, :], other=float("inf"))
        b_b = tl.argmin(b_row - 2 * b_second, 1)
        tl.store(p_index + o_n * MOST + i_r, b_a * CENTRES + b_b, mask=m_n)
        o_p = tl.arange(0, P_PAD)
        o_p2 = o_z + 2 * o_p[None, :]
        m_p = m_n[:, None] & (o_p < PAIRS)[None, :]
        b_x, b_y = complex_point(p_rows, b_a, b_b, o_p, PAIRS, tl.float32)
        b_x = tl.load(p_z + o_p2, mask=m_p, other=0.0) - b_x
        b_y = tl.load(p_z + o_p2 + 1, mask=m_p, other=0.0) - b_y
        tl.debug_barrier()
        tl.store(p_z + o_p2, b_x, mask=m_p)
        tl.store(p_z + o_p2 + 1, b_y, mask=m_p)
        tl.debug_barrier()
        p_rows += CENTRES * 2 * PAIRS
        p_pairs += CENTRES * CENTRES


@triton.jit(do_not_specialize=("N", "MOST"))
def real_search_kernel(
    p_z, p_rows, p_square, p_places, p_index, N, MOST,
    GROUPS: tl.constexpr, CENTRES: tl.constexpr, WIDTH: tl.constexpr,
    C_PAD: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Greedy residual codes of `BLOCK` vectors of one group: each round minimises |c_a|² - 2<z, c_a>."""
    i_g = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_w, o_c = tl.arange(0, W_PAD), tl.arange(0, C_PAD)
    o_z = (i_g.to(tl.int64) * N + o_n)[:, None] * WIDTH + o_w[None, :]
    b_z = tl.load(p_z + o_z, mask=m_n[:, None] & (o_w < WIDTH)[None, :], other=0.0)
    n_rounds, i_book = place(p_places, i_g, GROUPS)
    p_rows += i_book * (CENTRES * WIDTH)
    p_square += i_book * CENTRES
    p_index += i_g.to(tl.int64) * N * MOST
    for i_r in range(n_rounds):
        b_best = tl.full([BLOCK], float("inf"), tl.float32)
        b_a = tl.zeros([BLOCK], tl.int32)
        for start in range(0, CENTRES, C_PAD):
            m_c = start + o_c < CENTRES
            o_r = (start + o_c)[:, None] * WIDTH + o_w[None, :]
            b_c = tl.load(p_rows + o_r, mask=m_c[:, None] & (o_w < WIDTH)[None, :], other=0.0).to(tl.float32)
            b_square = tl.load(p_square + start + o_c, mask=m_c, other=float("inf"))
            b_cost = b_square[None, :] - 2 * tl.dot(b_z, tl.trans(b_c), input_precision="ieee")
            b_least = tl.min(b_cost, 1)
            b_a = tl.where(b_least < b_best, start + tl.argmin(b_cost, 1), b_a)
            b_best = tl.minimum(b_least, b_best)
        tl.store(p_index + o_n * MOST + i_r, b_a, mask=m_n)
        b_z -= load_part(p_rows, b_a, o_w, WIDTH, WIDTH, tl.float32)
        p_rows += CENTRES * WIDTH
        p_square += CENTRES


def search(
    z: torch.Tensor, books: torch.Tensor, places: torch.Tensor, most: int, pairs: torch.Tensor | None
) -> torch.Tensor:
    """Greedy residual indices int32 `[H, G, n, most]` of float32 `z` `[H, G, n, w]`, zero beyond a head's rounds.

    books, places: of `ResidualBooks`; pairs of keys lie side by side in `z`, and their index is `a * N + b`.
    most: the largest number of rounds.
    pairs: `additive.pair_table` of the books of keys, None for values.
    """
    heads, groups, count = z.shape[:3]
    centres, width = books.shape[1], books.shape[-1]
    index = z.new_zeros(heads, groups, count, most, dtype=torch.int32)
    padded = max(16, triton.next_power_of_2(width))
    block = 16
    arguments: dict[str, Any] = dict(
        p_z=z.clone(memory_format=torch.contiguous_format), p_rows=books, p_places=places, p_index=index, N=count,
        MOST=most, GROUPS=groups, CENTRES=centres, C_PAD=min(64, max(16, centres)), BLOCK=block, **launch_options(),
    )  # fmt: skip
    grid = (triton.cdiv(count, block), heads * groups)
    if pairs is not None:
        complex_search_kernel[grid](**arguments, p_pairs=pairs, PAIRS=width, P_PAD=padded, num_warps=8)
    else:
        square = books.float().square().sum(-1)
        real_search_kernel[grid](**arguments, p_square=square, WIDTH=width, W_PAD=padded)
    return index
