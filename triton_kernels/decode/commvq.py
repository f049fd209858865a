"""CommVQ's device functions (the paper's section 4.2; symbols as in `ResidualBooks`).

    score:       s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t]),   ẑ_j[t] = Σ_r c_r,j[a_r[t]] + i c_r,j[b_r[t]]
    accumulate:  acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]                 (residual form)
                 acc_h' += (p[t] scale[t]) bits_h'[t],  output = acc C   (encoder form, section 4.1, over all heads h')

The table holds the codebooks of `ResidualBooks`, `[H, G, R, N, 2, g]` of keys and `[H, G, R, N, w]` of values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.device import on_cpu
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.triton_kernels.common.codes import Codes, PackedTile, codes_of, divides, load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order

TOKENS = 128
"""Tokens per tile: more of them read each centre less often from beyond the L1 cache, too small for a codebook."""
KEY_PAIRS = 32
"""Most pairs of a tile of keys: their sums in float32, real and imaginary, must fit the registers."""
COLUMNS = 64
"""Most columns of a tile of values: with more, threads would share rows and each recompute their addresses."""


class Books(NamedTuple):
    """Constants of the residual form.

    groups: groups of a head; rounds: rounds of a group; width: pairs of a key's group, or numbers of a value's.
    bits: bits of an index; row: bytes of a token's codes; rotary: pairs of keys that RoPE rotates.
    """

    groups: int
    rounds: int
    width: int
    bits: int
    row: int
    rotary: int


class Bits(NamedTuple):
    """Constants of the encoder form: a head's bits, and heads."""

    codes: Codes
    heads: int


@triton.constexpr_function
def rounds_at_once(bits):
    """Rounds, of codes of `bits` bits, that are loaded and summed together in 16 bits: few, as those sums round."""
    return 24 // bits


@triton.jit
def load_run(p_codes, tile, i_code, COUNT: tl.constexpr, BITS: tl.constexpr, ROW: tl.constexpr):
    """Load `COUNT` codes per token from code `i_code` on, at most 24 bits, first code lowest: uint32."""
    i_bit = i_code * BITS
    b_run = tl.zeros([tile.o_t.shape[0]], tl.uint32)
    for i in tl.static_range((COUNT * BITS + 14) // 8):
        p_token = p_codes + tile.o_row * ROW + tl.minimum(i_bit // 8 + i, ROW - 1)
        b_run |= tl.load(p_token + tile.o_t * ROW, mask=tile.m_t, other=0).to(tl.uint32) << (8 * i)
    return b_run >> (i_bit % 8)


@triton.jit
def load_part(p_rows, b_index, o_w, WIDTH: tl.constexpr, STRIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Load rows `b_index` `[T]` of a codebook: `[T, padded]`, columns `o_w`, zero from `WIDTH` on."""
    o_c = b_index.to(tl.int32)[:, None] * STRIDE + o_w[None, :]
    if divides(o_w.shape[0], WIDTH):
        return tl.load(p_rows + o_c).to(DTYPE)
    return tl.load(p_rows + o_c, mask=(o_w < WIDTH)[None, :], other=0.0).to(DTYPE)


@triton.jit
def add_pairs(
    b_re, b_im, p_rows, b_run, o_w, COUNT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr
):
    """Add columns `o_w` of the points of keys in `COUNT` rounds with codes `b_run`, summed with each other first."""
    for i in tl.static_range(COUNT):
        b_code, p_round = b_run >> (2 * BITS * i), p_rows + i * (2**BITS * 2 * WIDTH)
        b_a, b_b = (b_code >> BITS) & (2**BITS - 1), b_code & (2**BITS - 1)
        b_x = load_part(p_round, b_a, o_w, WIDTH, 2 * WIDTH, DTYPE)
        b_y = load_part(p_round + WIDTH, b_a, o_w, WIDTH, 2 * WIDTH, DTYPE)
        b_x -= load_part(p_round + WIDTH, b_b, o_w, WIDTH, 2 * WIDTH, DTYPE)
        b_y += load_part(p_round, b_b, o_w, WIDTH, 2 * WIDTH, DTYPE)
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
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """Scores of keys, `s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t])` (section 4.2), tile by tile of pairs."""
    BITS: tl.constexpr = META.bits
    WIDTH: tl.constexpr = META.width
    GROUPS: tl.constexpr = META.groups
    ROTARY: tl.constexpr = META.rotary
    PAIRS: tl.constexpr = b_q[0].shape[0]
    TILES: tl.constexpr = len(b_q) // (2 * GROUPS)
    DTYPE: tl.constexpr = tl.float16 if FAST else tl.float32
    TURN: tl.constexpr = rounds_at_once(2 * BITS)
    BOOK: tl.constexpr = 2**BITS * 2 * WIDTH
    ROUNDS: tl.constexpr = META.rounds
    WHOLE: tl.constexpr = ROUNDS // TURN * TURN
    T: tl.constexpr = tile.o_t.shape[0]
    b_s = tl.zeros([T, b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(GROUPS * TILES):
        i_code = i // TILES * ROUNDS
        p_rows = tile.tables[0] + (tile.i_h * (GROUPS * ROUNDS) + i_code) * BOOK
        o_w = i % TILES * PAIRS + tl.arange(0, PAIRS)
        b_re = tl.zeros([T, PAIRS], tl.float32)
        b_im = tl.zeros([T, PAIRS], tl.float32)
        for i_r in range(0, WHOLE, TURN):
            b_run = load_run(tile.fields[0], tile, i_code + i_r, TURN, 2 * BITS, META.row)
            b_re, b_im = add_pairs(b_re, b_im, p_rows + i_r * BOOK, b_run, o_w, TURN, BITS, WIDTH, DTYPE)
        for i_r in range(WHOLE, ROUNDS):
            b_run = load_run(tile.fields[0], tile, i_code + i_r, 1, 2 * BITS, META.row)
            b_re, b_im = add_pairs(b_re, b_im, p_rows + i_r * BOOK, b_run, o_w, 1, BITS, WIDTH, DTYPE)
        o_p = i // TILES * WIDTH + o_w
        o_f = tile.o_t.to(tl.int64)[:, None] * (2 * ROTARY) + o_p[None, :]
        m_f = tile.m_t[:, None]
        if GROUPS * TILES * PAIRS != ROTARY:
            m_f = m_f & ((o_w < WIDTH) & (o_p < ROTARY))[None, :]
        b_cos = tl.load(tile.p_rope + o_f, mask=m_f, other=1.0).to(tl.float32)
        b_sin = tl.load(tile.p_rope + o_f + ROTARY, mask=m_f, other=0.0).to(tl.float32)
        b_x, b_y = (b_re * b_cos - b_im * b_sin).to(b_q[0].dtype), (b_re * b_sin + b_im * b_cos).to(b_q[0].dtype)
        b_s = tl.dot(b_x, b_q[2 * i], b_s, input_precision="ieee")
        b_s = tl.dot(b_y, b_q[2 * i + 1], b_s, input_precision="ieee")
    return b_s * load_scales(tile.fields[1], tile).to(tl.float32)[:, None]


@triton.jit
def accumulate(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Weighted sum of values in the residual form, `acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]`."""
    GROUPS: tl.constexpr = META.groups
    BITS: tl.constexpr = META.bits
    WIDTH: tl.constexpr = META.width
    TILES: tl.constexpr = len(b_acc) // GROUPS
    TURN: tl.constexpr = rounds_at_once(BITS)
    BOOK: tl.constexpr = 2**BITS * WIDTH
    SUM: tl.constexpr = tl.float16 if FAST else tl.float32
    ROUNDS: tl.constexpr = META.rounds
    WHOLE: tl.constexpr = ROUNDS // TURN * TURN
    p_rows = tile.tables[0] + tile.i_h * (GROUPS * ROUNDS) * BOOK
    o_w = tl.arange(0, b_acc[0].shape[0])
    b_scale = load_scales(tile.fields[1], tile).to(tl.float32)
    b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_sums = ()
    for i_g in tl.static_range(GROUPS):
        b_parts = ()
        for _ in tl.static_range(TILES):
            b_parts = b_parts + (tl.zeros([tile.o_t.shape[0], b_acc[0].shape[0]], tl.float32),)
        for i_r in range(0, WHOLE, TURN):
            i_code = i_g * ROUNDS + i_r
            b_run = load_run(tile.fields[0], tile, i_code, TURN, BITS, META.row)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, TURN, BITS, WIDTH, SUM)
            p_rows += TURN * BOOK
        for i_r in range(WHOLE, ROUNDS):
            i_code = i_g * ROUNDS + i_r
            b_run = load_run(tile.fields[0], tile, i_code, 1, BITS, META.row)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, 1, BITS, WIDTH, SUM)
            p_rows += BOOK
        for j in tl.static_range(TILES):
            b_v = tl.trans(b_parts[j].to(DTYPE))
            b_sums = b_sums + (tl.dot(b_v, b_weights, b_acc[i_g * TILES + j], input_precision="ieee"),)
    return b_sums


@triton.jit
def accumulate_bits(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Weighted sums of the bits of all heads, for values in the encoder form (section 4.1); tiles are by head."""
    b_scale = load_scales(tile.fields[1], tile).to(tl.float32)
    b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_sums = ()
    HEADS: tl.constexpr = META.heads
    CODES: tl.constexpr = META.codes
    for i in tl.static_range(HEADS):
        o_head = tile.o_row + (i - tile.i_h) * tile.s_head
        b_bits = load_codes(
            PackedTile(tile.fields, (), (), tile.p_rope, i, tile.s_head, o_head, tile.o_t, tile.m_t), CODES
        )
        for j in tl.static_range(len(b_bits)):
            b_tile = tl.trans(b_bits[j].to(DTYPE))
            b_sums = b_sums + (tl.dot(b_tile, b_weights, b_acc[i * len(b_bits) + j], input_precision="ieee"),)
    return b_sums


def bits_side(codebook: torch.Tensor) -> KernelSide:
    """Kernel operands of values in the encoder form, `codebook` float32 `[H, bits, D]`. Code space: all heads' bits."""
    heads, bits = len(codebook), codebook.shape[1] // len(codebook)
    matrix = in_code_order(codebook, (bits,) * heads).contiguous()
    meta = Bits(codes_of(1, bits, 0), heads)
    return KernelSide(accumulate_bits, meta, code_tiles(bits) * heads, tokens=64, warps=8, matrix=matrix)


@on_cpu()
def books_side(books: torch.Tensor, row: int, rope: RopeLayout | None) -> KernelSide:
    """Kernel operands of the codebooks of `ResidualBooks`, of keys if there is a `rope`, else of values.

    row: bytes of a token's codes.
    Code space: of keys, tiles of pairs by group, real parts first; of values, channels.
    """
    device, (_, groups, rounds, centres, *_, width) = books.device, books.shape
    rotary = rope.rotary if rope else 0
    meta = Books(groups, rounds, width, centres.bit_length() - 1, row, rotary)
    tile = min(KEY_PAIRS if rope else COLUMNS, max(16, triton.next_power_of_2(width)))
    tiles = -(-width // tile)
    if rope:
        function, widths, order = score, (tile,) * (2 * groups * tiles), torch.tensor(rope.order)
        spread = _spread(order.view(2, groups, width).transpose(0, 1), 2 * groups, tiles * tile)
        spread = spread.view(groups, 2, tiles, tile, -1).transpose(1, 2).flatten(0, 3).unsqueeze(0)
        matrix = spread.mT.contiguous().to(device)
    else:
        function, widths, matrix = accumulate, (tile,) * (groups * tiles), None
        if tiles * tile != width:
            matrix = _spread(torch.arange(groups * width), groups, tiles * tile).to(device)
    return KernelSide(function, meta, widths, (books,), tokens=TOKENS, warps=8, matrix=matrix)


def _spread(channels: torch.Tensor, tiles: int, padded: int) -> torch.Tensor:
    """Map `[1, tiles * padded, D]` to `tiles` runs of channels, each padded to `padded`."""
    rows = torch.eye(channels.numel())[channels.flatten()].view(tiles, -1, channels.numel())
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[1])).flatten(0, 1).unsqueeze(0)
