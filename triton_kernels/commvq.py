"""CommVQ's device functions and search kernel (the paper's section 4.2; equations in our symbols).

    score:       s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t]),   ẑ_j[t] = Σ_r c_r,j[a_r[t]] + i c_r,j[b_r[t]]
    accumulate:  acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]                 (residual form)
                 acc_h' += (p[t] scale[t]) bits_h'[t],  output = acc C   (encoder form, section 4.1, over all heads h')

The tables are the codebooks `[H, G, R, N, 2, g]` of keys (real, imaginary) and `[H, G, R, N, w]` of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..additive import pair_table
from ..layout import padded_words, words_per_token
from .codes import load_codes
from .operands import KernelSide, code_tiles, in_code_order, launch_options

if TYPE_CHECKING:
    from ..methods.commvq import CommVQCodec


@triton.jit
def load_index(p_codes, o_row, o_t, m_t, i_code, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Code `i_code` of each token `[T]`, from one run of bits per token; a code lies in at most two bytes."""
    o_b = (o_row + o_t) * BYTES
    b_low = tl.load(p_codes + o_b + i_code * BITS // 8, mask=m_t, other=0).to(tl.int32)
    b_high = tl.load(p_codes + o_b + ((i_code + 1) * BITS - 1) // 8, mask=m_t, other=0).to(tl.int32)
    return ((b_low | (b_high << 8)) >> (i_code * BITS % 8)) & (2**BITS - 1)


@triton.jit
def load_part(p_rows, b_index, o_w, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Rows `b_index` `[T]` of a codebook, float32 `[T, padded]`: columns `o_w`, of which `WIDTH` are there."""
    o_c = b_index[:, None] * STRIDE + o_w[None, :]
    if o_w.shape[0] == WIDTH:
        return tl.load(p_rows + o_c).to(tl.float32)
    return tl.load(p_rows + o_c, mask=(o_w < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def complex_point(p_rows, b_a, b_b, o_j, PAIRS: tl.constexpr):
    """`c[a] + i c[b]`, real and imaginary `[T, padded]`, of one round's centres."""
    b_re = load_part(p_rows, b_a, o_j, PAIRS, 2 * PAIRS) - load_part(p_rows + PAIRS, b_b, o_j, PAIRS, 2 * PAIRS)
    b_im = load_part(p_rows + PAIRS, b_a, o_j, PAIRS, 2 * PAIRS) + load_part(p_rows, b_b, o_j, PAIRS, 2 * PAIRS)
    return b_re, b_im


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = META[0]
    ROUNDS: tl.constexpr = META[1]
    BITS: tl.constexpr = META[2]
    PAIRS: tl.constexpr = META[3]
    BYTES: tl.constexpr = META[4]
    ROTARY: tl.constexpr = META[5]
    o_j = tl.arange(0, b_q[0].shape[1])
    b_s = tl.zeros([b_q[0].shape[0], o_t.shape[0]], tl.float32)
    for i_g in tl.static_range(GROUPS):
        b_re = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
        b_im = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
        p_rows = tables[0] + (i_h * GROUPS + i_g) * (ROUNDS * 2**BITS * 2 * PAIRS)
        for i_r in range(ROUNDS):
            b_code = load_index(fields[0], o_row, o_t, m_t, i_g * ROUNDS + i_r, 2 * BITS, BYTES)
            b_x, b_y = complex_point(p_rows, b_code >> BITS, b_code & (2**BITS - 1), o_j, PAIRS)
            b_re += b_x
            b_im += b_y
            p_rows += 2**BITS * 2 * PAIRS
        o_p = i_g * PAIRS + o_j
        o_f = o_t.to(tl.int64)[:, None] * (2 * ROTARY) + o_p[None, :]
        m_f = m_t[:, None] & ((o_j < PAIRS) & (o_p < ROTARY))[None, :]
        b_cos = tl.load(p_rope + o_f, mask=m_f, other=1.0).to(tl.float32)
        b_sin = tl.load(p_rope + o_f + ROTARY, mask=m_f, other=0.0).to(tl.float32)
        b_turned_re = (b_re * b_cos - b_im * b_sin).to(b_q[0].dtype)
        b_turned_im = (b_re * b_sin + b_im * b_cos).to(b_q[0].dtype)
        b_s = tl.dot(b_q[2 * i_g], tl.trans(b_turned_re), b_s, input_precision=PRECISION)
        b_s = tl.dot(b_q[2 * i_g + 1], tl.trans(b_turned_im), b_s, input_precision=PRECISION)
    b_scale = tl.load(fields[1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
    return b_s * b_scale[None, :]


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The residual form of values."""
    GROUPS: tl.constexpr = META[0]
    ROUNDS: tl.constexpr = META[1]
    BITS: tl.constexpr = META[2]
    WIDTH: tl.constexpr = META[3]
    BYTES: tl.constexpr = META[4]
    o_w = tl.arange(0, b_acc[0].shape[1])
    b_scale = tl.load(fields[1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
    b_weights = (b_p * b_scale[None, :]).to(DTYPE)
    b_sums = ()
    for i_g in tl.static_range(GROUPS):
        b_v = tl.zeros([o_t.shape[0], b_acc[0].shape[1]], tl.float32)
        p_rows = tables[0] + (i_h * GROUPS + i_g) * (ROUNDS * 2**BITS * WIDTH)
        for i_r in range(ROUNDS):
            b_code = load_index(fields[0], o_row, o_t, m_t, i_g * ROUNDS + i_r, BITS, BYTES)
            b_v += load_part(p_rows, b_code, o_w, WIDTH, WIDTH)
            p_rows += 2**BITS * WIDTH
        b_sums = b_sums + (tl.dot(b_weights, b_v.to(DTYPE), b_acc[i_g], input_precision=PRECISION),)
    return b_sums


@triton.jit
def accumulate_bits(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The encoder form of values: weighted sums of the bits of all heads, tiles by heads."""
    b_scale = tl.load(fields[1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
    b_weights = (b_p * b_scale[None, :]).to(DTYPE)
    b_sums = ()
    HEADS: tl.constexpr = META[2]
    for i in tl.static_range(HEADS):
        o_own = o_row + (i - i_h) * s_head
        b_bits = load_codes(fields[0], fields[0], o_own, o_t, m_t, 1, META[0], META[1], META[0])
        for j in tl.static_range(len(b_bits)):
            b_tile = b_bits[j].to(DTYPE)
            b_sums = b_sums + (tl.dot(b_weights, b_tile, b_acc[i * len(b_bits) + j], input_precision=PRECISION),)
    return b_sums


def commvq_side(codec: CommVQCodec) -> KernelSide:
    """Operands of a CommVQ codec. Code space: keys' pairs by groups, real parts first; values' channels, or bits."""
    if codec.codebooks is None:
        heads, bits = codec.context.heads, codec.fields[0].shape[0] * 8
        meta: tuple[int, ...] = (words_per_token(bits), padded_words(bits), heads)
        output_map = in_code_order(codec.output_map(), (bits,) * heads).contiguous()
        return KernelSide(score, accumulate_bits, meta, code_tiles(bits) * heads, warps=4, output_map=output_map)
    books = codec.codebooks
    groups, rounds, centres, width = books.shape[1], books.shape[2], books.shape[3], books.shape[-1]
    padded = max(16, triton.next_power_of_2(width))
    meta = (groups, rounds, centres.bit_length() - 1, width, codec.fields[0].shape[0])
    if codec.context.side == "values":
        widths = (padded,) * groups
        output_map = None
        if padded != width:
            output_map = _spread(torch.arange(codec.context.head_dim), groups, padded).to(books.device)
        return KernelSide(score, accumulate, meta, widths, tables=(books,), warps=4, output_map=output_map)
    assert codec.context.rope is not None
    channels = torch.tensor(codec.context.rope.order).view(2, groups, width).transpose(0, 1)
    query_map = _spread(channels, 2 * groups, padded).mT.contiguous().to(books.device)
    if codec.weights is not None:
        order = torch.tensor(codec.context.rope.order, device=books.device)
        query_map = query_map / codec.weights.float().repeat(1, 2)[:, order.argsort(), None]
    meta = (*meta, codec.context.rope.rotary)
    return KernelSide(score, accumulate, meta, (padded,) * (2 * groups), tables=(books,), warps=4, query_map=query_map)


def _spread(channels: torch.Tensor, tiles: int, padded: int) -> torch.Tensor:
    """The map `[1, tiles * padded, D]` of `tiles` runs of channels, each padded."""
    rows = torch.eye(channels.numel())[channels.flatten()].view(tiles, -1, channels.numel())
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[1])).flatten(0, 1).unsqueeze(0)


@triton.jit(do_not_specialize=("N",))
def complex_search_kernel(
    p_z, p_rows, p_pairs, p_index, N,
    ROUNDS: tl.constexpr, CENTRES: tl.constexpr, PAIRS: tl.constexpr,
    C_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Greedy residual codes of `BLOCK` vectors of one group: in each round the (a, b) of least

        (|c_a|² + |c_b|² + 2<c_a, i c_b>) - 2<z, i c_b> - 2<z, c_a>,

    the parenthesis from the table `p_pairs` `[R, N, N]`; as `additive.complex_encode`, without its N² distances.
    `p_z` becomes the residual: it is read in parts, since all of it takes more registers than there are.
    """
    i_g = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_c = tl.arange(0, C_PAD)
    m_c = o_c < CENTRES
    p_z += i_g.to(tl.int64) * N * (2 * PAIRS)
    p_rows += i_g * (ROUNDS * CENTRES * 2 * PAIRS)
    p_pairs += i_g * (ROUNDS * CENTRES * CENTRES)
    p_index += i_g.to(tl.int64) * N * ROUNDS
    o_z = o_n[:, None] * (2 * PAIRS)
    for i_r in range(ROUNDS):
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
        tl.store(p_index + o_n * ROUNDS + i_r, b_a * CENTRES + b_b, mask=m_n)
        o_p = tl.arange(0, P_PAD)
        o_p2 = o_z + 2 * o_p[None, :]
        m_p = m_n[:, None] & (o_p < PAIRS)[None, :]
        b_x, b_y = complex_point(p_rows, b_a, b_b, o_p, PAIRS)
        b_x = tl.load(p_z + o_p2, mask=m_p, other=0.0) - b_x
        b_y = tl.load(p_z + o_p2 + 1, mask=m_p, other=0.0) - b_y
        tl.debug_barrier()
        tl.store(p_z + o_p2, b_x, mask=m_p)
        tl.store(p_z + o_p2 + 1, b_y, mask=m_p)
        tl.debug_barrier()
        p_rows += CENTRES * 2 * PAIRS
        p_pairs += CENTRES * CENTRES


@triton.jit(do_not_specialize=("N",))
def real_search_kernel(
    p_z, p_rows, p_square, p_index, N,
    ROUNDS: tl.constexpr, CENTRES: tl.constexpr, WIDTH: tl.constexpr,
    C_PAD: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Greedy residual codes of `BLOCK` vectors of one group: in each round the least |c_a|² - 2<z, c_a>."""
    i_g = tl.program_id(1)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < N
    o_w, o_c = tl.arange(0, W_PAD), tl.arange(0, C_PAD)
    o_z = (i_g.to(tl.int64) * N + o_n)[:, None] * WIDTH + o_w[None, :]
    b_z = tl.load(p_z + o_z, mask=m_n[:, None] & (o_w < WIDTH)[None, :], other=0.0)
    p_rows += i_g * (ROUNDS * CENTRES * WIDTH)
    p_square += i_g * (ROUNDS * CENTRES)
    p_index += i_g.to(tl.int64) * N * ROUNDS
    for i_r in range(ROUNDS):
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
        tl.store(p_index + o_n * ROUNDS + i_r, b_a, mask=m_n)
        b_z -= load_part(p_rows, b_a, o_w, WIDTH, WIDTH)
        p_rows += CENTRES * WIDTH
        p_square += CENTRES


def search(z: torch.Tensor, books: torch.Tensor) -> torch.Tensor:
    """Greedy residual indices int32 `[H, G, n, R]` of float32 `z` `[H, G, n, w]`.

    books: `[H, G, R, N, 2, w / 2]` for keys, whose pairs lie side by side in `z` and whose index is `a * N + b`;
    `[H, G, R, N, w]` for values.
    """
    heads, groups, rounds, centres = books.shape[:4]
    width, count = books.shape[-1], z.shape[2]
    index = z.new_zeros(heads, groups, count, rounds, dtype=torch.int32)
    padded = max(16, triton.next_power_of_2(width))
    block = 16
    arguments: dict[str, Any] = dict(
        p_z=z.clone(memory_format=torch.contiguous_format), p_rows=books, p_index=index, N=count,
        ROUNDS=rounds, CENTRES=centres, C_PAD=min(64, max(16, centres)), BLOCK=block, **launch_options(),
    )  # fmt: skip
    grid = (triton.cdiv(count, block), heads * groups)
    if books.ndim == 6:
        pairs = pair_table(books.float().mT)
        complex_search_kernel[grid](**arguments, p_pairs=pairs, PAIRS=width, P_PAD=padded, num_warps=8)
    else:
        square = books.float().square().sum(-1)
        real_search_kernel[grid](**arguments, p_square=square, WIDTH=width, W_PAD=padded)
    return index
