"""CommVQ's device functions (the paper's section 4.2; equations in our symbols).

    score:       s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t]),   ẑ_j[t] = Σ_r c_r,j[a_r[t]] + i c_r,j[b_r[t]]
    accumulate:  acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]                 (residual form)
                 acc_h' += (p[t] scale[t]) bits_h'[t],  output = acc C   (encoder form, section 4.1, over all heads h')

The tables are the codebooks `[H, G, R, N, 2, g]` of keys (real, imaginary) and `[H, G, R, N, w]` of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words, words_per_token
from kvcache_compress.triton_kernels.common.codes import load_codes
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order

if TYPE_CHECKING:
    from kvcache_compress.methods.commvq.codec import CommVQCodec

TOKENS = 128
"""Tokens per tile: more of them read each centre less often from beyond the L1 cache, too small for a codebook."""
COLUMNS = 64
"""Most columns of a tile of values: with more, threads would share rows and each recompute their addresses."""


class Books(NamedTuple):
    """Groups, rounds, bits of a code, width of a centre (in pairs for keys), bytes of a token, rotary pairs."""

    groups: int
    rounds: int
    bits: int
    width: int
    bytes: int
    rotary: int = 0


class Bits(NamedTuple):
    """Constants of the encoder form: words of a head's bits, the same padded (`codes.py`), and heads."""

    words: int
    padded: int
    heads: int


@triton.constexpr_function
def rounds_at_once(bits):
    """Rounds, of codes of `bits` bits, that are loaded and summed together in 16 bits: few, as those sums round."""
    return 24 // bits


@triton.jit
def load_run(
    p_codes, o_row, o_t, m_t, i_code, COUNT: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr
):
    """Load `COUNT` codes per token from code `i_code` on, at most 24 bits, the first code lowest: uint32 `[T]`.

    WHOLE: runs begin on a byte boundary, which saves one byte.
    """
    p_token = p_codes + (o_row + o_t) * BYTES
    i_byte = i_code * BITS // 8
    b_run = tl.load(p_token + i_byte, mask=m_t, other=0).to(tl.uint32)
    for i in tl.static_range(1, (COUNT * BITS + (7 if WHOLE else 14)) // 8):
        b_byte = tl.load(p_token + tl.minimum(i_byte + i, BYTES - 1), mask=m_t, other=0)
        b_run |= b_byte.to(tl.uint32) << (8 * i)
    if not WHOLE:
        b_run = b_run >> (i_code * BITS % 8)
    return b_run


@triton.constexpr_function
def fills(width, columns):
    """True if tiles of `columns` columns cover a row of `width` numbers exactly."""
    return width % columns == 0


@triton.jit
def load_part(p_rows, b_index, o_w, WIDTH: tl.constexpr, STRIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Load rows `b_index` `[T]` of a codebook: `[T, padded]`, columns `o_w`, zero from `WIDTH` on."""
    o_c = b_index.to(tl.int32)[:, None] * STRIDE + o_w[None, :]
    if fills(WIDTH, o_w.shape[0]):
        return tl.load(p_rows + o_c).to(DTYPE)
    return tl.load(p_rows + o_c, mask=(o_w < WIDTH)[None, :], other=0.0).to(DTYPE)


@triton.jit
def complex_point(p_rows, b_a, b_b, o_j, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Points `c[a] + i c[b]` of one round, real and imaginary parts `[T, padded]`."""
    b_re = load_part(p_rows, b_a, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_im = load_part(p_rows + PAIRS, b_a, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_re -= load_part(p_rows + PAIRS, b_b, o_j, PAIRS, 2 * PAIRS, DTYPE)
    b_im += load_part(p_rows, b_b, o_j, PAIRS, 2 * PAIRS, DTYPE)
    return b_re, b_im


@triton.jit
def add_complex_rounds(
    b_re, b_im, p_rows, b_run, o_j, COUNT: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr
):
    """Add the points of keys in `COUNT` rounds with codes `b_run`, summed with each other first, in `DTYPE`."""
    for i in tl.static_range(COUNT):
        b_code = b_run >> (2 * BITS * i)
        b_a, b_b = (b_code >> BITS) & (2**BITS - 1), b_code & (2**BITS - 1)
        b_x, b_y = complex_point(p_rows + i * (2**BITS * 2 * PAIRS), b_a, b_b, o_j, PAIRS, DTYPE)
        b_first, b_second = (b_x, b_y) if i == 0 else (b_first + b_x, b_second + b_y)  # noqa: F821 - bound by turn 0
    return b_re + b_first, b_im + b_second


@triton.jit
def add_rounds(
    b_parts, p_rows, b_run, o_w, COUNT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr
):
    """Add the rows of values in `COUNT` rounds with codes `b_run`, summed with each other first, tile by tile."""
    b_sums = ()
    for j in tl.static_range(len(b_parts)):
        o_c = j * o_w.shape[0] + o_w
        for i in tl.static_range(COUNT):
            b_code = (b_run >> (BITS * i)) & (2**BITS - 1)
            b_row = load_part(p_rows + i * (2**BITS * WIDTH), b_code, o_c, WIDTH, WIDTH, DTYPE)
            b_sum = b_row if i == 0 else b_sum + b_row  # noqa: F821 - bound by turn 0
        b_sums = b_sums + (b_parts[j] + b_sum,)
    return b_sums


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scores of keys, `s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t])` (section 4.2)."""
    GROUPS: tl.constexpr = META.groups
    ROUNDS: tl.constexpr = META.rounds
    BITS: tl.constexpr = META.bits
    PAIRS: tl.constexpr = META.width
    BYTES: tl.constexpr = META.bytes
    ROTARY: tl.constexpr = META.rotary
    DTYPE: tl.constexpr = tl.float16 if FAST else tl.float32
    TURN: tl.constexpr = rounds_at_once(2 * BITS)
    WHOLE: tl.constexpr = (TURN * 2 * BITS % 8 == 0) & ((GROUPS == 1) | (ROUNDS * 2 * BITS % 8 == 0))
    REST: tl.constexpr = ROUNDS % TURN
    o_j = tl.arange(0, b_q[0].shape[1])
    b_s = tl.zeros([b_q[0].shape[0], o_t.shape[0]], tl.float32)
    for i_g in tl.static_range(GROUPS):
        b_re = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
        b_im = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
        p_rows = tables[0] + (i_h * GROUPS + i_g) * (ROUNDS * 2**BITS * 2 * PAIRS)
        for i_r in range(i_g * ROUNDS, i_g * ROUNDS + ROUNDS - REST, TURN):
            b_run = load_run(fields[0], o_row, o_t, m_t, i_r, TURN, 2 * BITS, BYTES, WHOLE)
            b_re, b_im = add_complex_rounds(b_re, b_im, p_rows, b_run, o_j, TURN, BITS, PAIRS, DTYPE)
            p_rows += TURN * 2**BITS * 2 * PAIRS
        if REST:
            b_run = load_run(fields[0], o_row, o_t, m_t, i_g * ROUNDS + ROUNDS - REST, REST, 2 * BITS, BYTES, WHOLE)
            b_re, b_im = add_complex_rounds(b_re, b_im, p_rows, b_run, o_j, REST, BITS, PAIRS, DTYPE)
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
    """Weighted sum of values in the residual form, `acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]`."""
    GROUPS: tl.constexpr = META.groups
    ROUNDS: tl.constexpr = META.rounds
    BITS: tl.constexpr = META.bits
    WIDTH: tl.constexpr = META.width
    BYTES: tl.constexpr = META.bytes
    TILES: tl.constexpr = len(b_acc) // GROUPS
    TURN: tl.constexpr = rounds_at_once(BITS)
    WHOLE: tl.constexpr = (TURN * BITS % 8 == 0) & ((GROUPS == 1) | (ROUNDS * BITS % 8 == 0))
    REST: tl.constexpr = ROUNDS % TURN
    SUM: tl.constexpr = tl.float16 if FAST else tl.float32
    o_w = tl.arange(0, b_acc[0].shape[1])
    b_scale = tl.load(fields[1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
    b_weights = (b_p * b_scale[None, :]).to(DTYPE)
    b_sums = ()
    for i_g in tl.static_range(GROUPS):
        b_parts = ()
        for _ in tl.static_range(TILES):
            b_parts = b_parts + (tl.zeros([o_t.shape[0], b_acc[0].shape[1]], tl.float32),)
        p_rows = tables[0] + (i_h * GROUPS + i_g) * (ROUNDS * 2**BITS * WIDTH)
        for i_r in range(i_g * ROUNDS, i_g * ROUNDS + ROUNDS - REST, TURN):
            b_run = load_run(fields[0], o_row, o_t, m_t, i_r, TURN, BITS, BYTES, WHOLE)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, TURN, BITS, WIDTH, SUM)
            p_rows += TURN * 2**BITS * WIDTH
        if REST:
            b_run = load_run(fields[0], o_row, o_t, m_t, i_g * ROUNDS + ROUNDS - REST, REST, BITS, BYTES, WHOLE)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, REST, BITS, WIDTH, SUM)
        for j in tl.static_range(TILES):
            b_v = b_parts[j].to(DTYPE)
            b_sums = b_sums + (tl.dot(b_weights, b_v, b_acc[i_g * TILES + j], input_precision=PRECISION),)
    return b_sums


@triton.jit
def accumulate_bits(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weighted sums of the bits of all heads, for values in the encoder form (section 4.1); tiles are by head."""
    b_scale = tl.load(fields[1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
    b_weights = (b_p * b_scale[None, :]).to(DTYPE)
    b_sums = ()
    HEADS: tl.constexpr = META.heads
    for i in tl.static_range(HEADS):
        o_head = o_row + (i - i_h) * s_head
        b_bits = load_codes(fields[0], fields[0], o_head, o_t, m_t, 1, META.words, META.padded, META.words)
        for j in tl.static_range(len(b_bits)):
            b_tile = b_bits[j].to(DTYPE)
            b_sums = b_sums + (tl.dot(b_weights, b_tile, b_acc[i * len(b_bits) + j], input_precision=PRECISION),)
    return b_sums


def commvq_side(codec: CommVQCodec) -> KernelSide:
    """Kernel operands of a CommVQ codec.

    Code space: of keys, pairs by group, real parts first; of values, channels or encoder bits.
    """
    if codec.codebooks is None:
        heads, bits = codec.context.heads, codec.fields[0].shape[0] * 8
        output_map = in_code_order(codec.output_map(), (bits,) * heads).contiguous()
        widths = code_tiles(bits) * heads
        meta = Bits(words_per_token(bits), padded_words(bits), heads)
        return KernelSide(score, accumulate_bits, meta, widths, tokens=64, warps=8, output_map=output_map)
    books = codec.codebooks
    groups, rounds, centres, width = books.shape[1], books.shape[2], books.shape[3], books.shape[-1]
    padded = max(16, triton.next_power_of_2(width))
    form = Books(groups, rounds, centres.bit_length() - 1, width, codec.fields[0].shape[0])
    if codec.context.side == "values":
        tile = min(padded, COLUMNS)
        widths = (tile,) * (groups * padded // tile)
        output_map = None
        if padded != width:
            output_map = _spread(torch.arange(codec.context.head_dim), groups, padded).to(books.device)
        return KernelSide(score, accumulate, form, widths, (books,), tokens=TOKENS, warps=8, output_map=output_map)
    assert codec.context.rope is not None
    channels = torch.tensor(codec.context.rope.order).view(2, groups, width).transpose(0, 1)
    query_map = _spread(channels, 2 * groups, padded).mT.contiguous().to(books.device)
    if codec.weights is not None:
        order = torch.tensor(codec.context.rope.order, device=books.device)
        query_map = query_map / codec.weights.float().repeat(1, 2)[:, order.argsort(), None]
    form = form._replace(rotary=codec.context.rope.rotary)
    widths = (padded,) * (2 * groups)
    return KernelSide(score, accumulate, form, widths, (books,), tokens=TOKENS, warps=8, query_map=query_map)


def _spread(channels: torch.Tensor, tiles: int, padded: int) -> torch.Tensor:
    """Map `[1, tiles * padded, D]` to `tiles` runs of channels, each padded to `padded`."""
    rows = torch.eye(channels.numel())[channels.flatten()].view(tiles, -1, channels.numel())
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[1])).flatten(0, 1).unsqueeze(0)
