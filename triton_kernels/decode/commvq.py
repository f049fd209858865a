"""CommVQ's device functions (the paper's section 4.2; equations in our symbols).

    score:       s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t]),   ẑ_j[t] = Σ_r c_r,j[a_r[t]] + i c_r,j[b_r[t]]
    accumulate:  acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]                 (residual form)
                 acc_h' += (p[t] scale[t]) bits_h'[t],  output = acc C   (encoder form, section 4.1, over all heads h')

The tables are the codebooks, in parts of `PART` pairs for keys (`key_table`) and `[S, N, w]` of values, and `[H, 3]`:
the first book, the rounds and the first byte of each head (`ResidualBooks`). The codes of a token are one run of bytes
over the rows of all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.constants import on_cpu
from kvcache_compress.codecs.layout import padded_words, words_per_token
from kvcache_compress.triton_kernels.common.codes import load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order

from .commvq_sums import sums_side

if TYPE_CHECKING:
    from kvcache_compress.methods.commvq.codec import CommVQCodec
    from kvcache_compress.methods.commvq.residual import ResidualBooks

TOKENS = 128
"""Tokens per tile: more of them read each centre less often from beyond the L1 cache, too small for a codebook."""
PART = 32
"""Most pairs of a part of the keys, whose row in 16 bits is a line of the first-level cache."""
QUAD = tl.constexpr(4)
"""Pairs whose real and imaginary parts lie side by side in a row, as a thread loads them."""
COLUMNS = 64
"""Most columns of a tile of values: with more, threads would share rows and each recompute their addresses."""


class Books(NamedTuple):
    """Groups, bits of an index, width of a value's centre, bytes of a row and of all heads'.

    whole: True if codes that are loaded together begin on byte boundaries, but for a head's last ones.
    """

    groups: int
    bits: int
    width: int
    row: int
    bytes: int
    whole: bool


class KeyBooks(NamedTuple):
    """Parts of a key and of a group, pairs of a part and rotary pairs; the rest as in `Books`.

    pairs: of a part, some of them padding in the last part of a group; width: pairs of a group.
    """

    parts: int
    split: int
    pairs: int
    width: int
    rotary: int
    bits: int
    row: int
    bytes: int
    whole: bool


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
    p_codes, i_h, s_head, o_row, o_t, m_t, i_first, i_code,
    COUNT: tl.constexpr, BITS: tl.constexpr, META: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load `COUNT` codes per token from code `i_code` of byte `i_first` on, at most 24 bits, first code lowest: uint32.

    Byte i of a token lies in row `i // META.row` of the heads. WHOLE: the run begins on a byte, which saves one.
    """
    ROW: tl.constexpr = META.row
    BYTES: tl.constexpr = META.bytes
    i_bit = i_code * BITS
    i_byte = i_first + i_bit // 8
    i_row = i_byte // ROW
    i_column = i_byte - i_row * ROW
    p_token = p_codes + (o_row + (i_row - i_h) * s_head) * ROW + i_column + o_t * ROW
    b_run = tl.load(p_token, mask=m_t, other=0).to(tl.uint32)
    for i in tl.static_range(1, (COUNT * BITS + (7 if WHOLE else 14)) // 8):
        i_next = i if WHOLE else tl.minimum(i, BYTES - 1 - i_byte)
        if ROW > 2:  # at most 24 bits from any bit on: no more than one row further
            i_next += tl.where(i_column + i_next < ROW, 0, (s_head - 1) * ROW)
        else:
            i_next += (i_column + i_next) // ROW * (s_head - 1) * ROW
        b_run |= tl.load(p_token + i_next, mask=m_t, other=0).to(tl.uint32) << (8 * i)
    if not WHOLE:
        b_run = b_run >> (i_bit % 8)
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
def load_pairs(p_rows, b_index, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Load rows `b_index` `[T]` of a part of a codebook: real and imaginary parts, `[T, PAIRS / QUAD, QUAD]`."""
    o_c = b_index.to(tl.int32)[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    b_row = tl.reshape(tl.load(p_rows + o_c).to(DTYPE), [b_index.shape[0], PAIRS // QUAD, 2, QUAD])
    return tl.split(tl.permute(b_row, [0, 1, 3, 2]))


@triton.jit
def add_pairs(
    b_re, b_im, p_rows, b_run,
    COUNT: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the points of keys in `COUNT` rounds with codes `b_run`, summed with each other first, in `DTYPE`.

    STEP: numbers from a round's rows to the next's.
    """
    for i in tl.static_range(COUNT):
        b_code = b_run >> (2 * BITS * i)
        b_a_re, b_a_im = load_pairs(p_rows + i * STEP, (b_code >> BITS) & (2**BITS - 1), PAIRS, DTYPE)
        b_b_re, b_b_im = load_pairs(p_rows + i * STEP, b_code & (2**BITS - 1), PAIRS, DTYPE)
        b_x, b_y = b_a_re - b_b_im, b_a_im + b_b_re
        b_first, b_second = (b_x, b_y) if i == 0 else (b_first + b_x, b_second + b_y)  # noqa: F821 - bound by turn 0
    return b_re + b_first, b_im + b_second


@triton.jit
def load_word(p_codes, i_word, i_h, s_head, o_row, o_t, m_t, b_other, META: tl.constexpr):
    """Load word `i_word` of the codes, or the last one, over the rows of all heads; `META.row` is a multiple of 4."""
    ROW: tl.constexpr = META.row // 4
    i_word = tl.minimum(i_word, META.bytes // 4 - 1)
    p_words = p_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    p_words += (o_row + (i_word // ROW - i_h) * s_head) * ROW + i_word % ROW
    return tl.load(p_words + o_t * ROW, mask=m_t, other=b_other)


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
def run_of_words(b_low, b_high, i_bit):
    """The 32 bits from bit `i_bit % 32` of the first of two words on: uint32."""
    return ((b_high.to(tl.int64) << 32 | b_low.to(tl.uint32, bitcast=True)) >> i_bit % 32).to(tl.uint32)


@triton.jit
def score_part(
    b_q, fields, tables, p_rope, i_part, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scores of part `i_part` of keys by its queries `b_q`, two tiles `[pairs, M]`: `[T, M]`."""
    BITS: tl.constexpr = META.bits
    PAIRS: tl.constexpr = META.pairs
    ROTARY: tl.constexpr = META.rotary
    SPLIT: tl.constexpr = META.split
    DTYPE: tl.constexpr = tl.float16 if FAST else tl.float32
    TURN: tl.constexpr = rounds_at_once(2 * BITS)
    STEP: tl.constexpr = SPLIT * 2**BITS * 2 * PAIRS
    WHOLE: tl.constexpr = META.whole
    WORDS: tl.constexpr = META.row % 4 == 0
    T: tl.constexpr = o_t.shape[0]
    i_g = i_part // SPLIT
    n_rounds, i_first = tl.load(tables[1] + 3 * i_h + 1), tl.load(tables[1] + 3 * i_h + 2)
    n_whole = n_rounds // TURN * TURN
    p_rows = tables[0] + (tl.load(tables[1] + 3 * i_h) + i_g * n_rounds) * STEP + i_part % SPLIT * (2**BITS * 2 * PAIRS)
    b_re = tl.zeros([T, PAIRS // QUAD, QUAD], tl.float32)
    b_im = tl.zeros([T, PAIRS // QUAD, QUAD], tl.float32)
    i_code = i_g * n_rounds
    # Codes are read a turn ahead, so that rows wait for their own memory only.
    i_bit = i_first * 8 + i_code * (2 * BITS)
    if WORDS:
        b_low = load_word(fields[0], i_bit // 32, i_h, s_head, o_row, o_t, m_t, 0, META)
        b_high = load_word(fields[0], i_bit // 32 + 1, i_h, s_head, o_row, o_t, m_t, 0, META)
    else:
        m_run = tl.where(n_whole > 0, m_t, False)
        b_next = load_run(fields[0], i_h, s_head, o_row, o_t, m_run, i_first, i_code, TURN, 2 * BITS, META, WHOLE)
    for i_r in range(0, n_whole, TURN):
        if WORDS:
            b_run = run_of_words(b_low, b_high, i_bit)
            further = i_bit % 32 + TURN * 2 * BITS >= 32
            i_bit += TURN * 2 * BITS
            b_low = tl.where(further, b_high, b_low)
            m_run = tl.where(further, m_t, False)
            b_high = load_word(fields[0], i_bit // 32 + 1, i_h, s_head, o_row, o_t, m_run, b_high, META)
        else:
            b_run = b_next
            i_code += TURN
            m_run = tl.where(i_r + TURN < n_whole, m_t, False)
            b_next = load_run(fields[0], i_h, s_head, o_row, o_t, m_run, i_first, i_code, TURN, 2 * BITS, META, WHOLE)
        b_re, b_im = add_pairs(b_re, b_im, p_rows, b_run, TURN, BITS, PAIRS, STEP, DTYPE)
        p_rows += TURN * STEP
    for i_r in range(n_whole, n_rounds):
        if WORDS:
            b_run = run_of_words(b_low, b_high, i_bit) >> (i_r - n_whole) * (2 * BITS)
        else:
            i_code = i_g * n_rounds + i_r
            b_run = load_run(fields[0], i_h, s_head, o_row, o_t, m_t, i_first, i_code, 1, 2 * BITS, META, False)
        b_re, b_im = add_pairs(b_re, b_im, p_rows, b_run, 1, BITS, PAIRS, STEP, DTYPE)
        p_rows += STEP
    o_j = i_part % SPLIT * PAIRS + tl.arange(0, PAIRS // QUAD)[:, None] * QUAD + tl.arange(0, QUAD)[None, :]
    o_p = (i_g * META.width + o_j)[None, :, :]
    o_f = o_t.to(tl.int64)[:, None, None] * (2 * ROTARY) + o_p
    m_f = m_t[:, None, None]
    if META.parts * PAIRS != ROTARY:
        m_f = m_f & ((o_j < META.width)[None, :, :] & (o_p < ROTARY))
    b_cos = tl.load(p_rope + o_f, mask=m_f, other=1.0).to(tl.float32)
    b_sin = tl.load(p_rope + o_f + ROTARY, mask=m_f, other=0.0).to(tl.float32)
    b_turned_re = tl.reshape((b_re * b_cos - b_im * b_sin).to(b_q[0].dtype), [T, PAIRS])
    b_turned_im = tl.reshape((b_re * b_sin + b_im * b_cos).to(b_q[0].dtype), [T, PAIRS])
    b_s = tl.dot(b_turned_re, b_q[0], input_precision=PRECISION)
    b_s = tl.dot(b_turned_im, b_q[1], b_s, input_precision=PRECISION)
    b_scale = load_scales(fields[1], o_row, o_t, m_t).to(tl.float32)
    return b_s * b_scale[:, None]


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scores of keys, `s[t] = scale[t] Σ_j Re(conj(q_j) e^(iθ_j,t) ẑ_j[t])` (section 4.2), part by part."""
    PARTS: tl.constexpr = META.parts
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(PARTS):
        b_s += score_part(
            b_q[2 * i : 2 * i + 2], fields, tables, p_rope, i, i_h, s_head, o_row, o_t, m_t, META, PRECISION, FAST
        )
    return b_s


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weighted sum of values in the residual form, `acc += (p[t] scale[t]) Σ_r c_r[a_r[t]]`."""
    GROUPS: tl.constexpr = META.groups
    BITS: tl.constexpr = META.bits
    WIDTH: tl.constexpr = META.width
    TILES: tl.constexpr = len(b_acc) // GROUPS
    TURN: tl.constexpr = rounds_at_once(BITS)
    BOOK: tl.constexpr = 2**BITS * WIDTH
    SUM: tl.constexpr = tl.float16 if FAST else tl.float32
    WHOLE: tl.constexpr = META.whole
    n_rounds, i_first = tl.load(tables[1] + 3 * i_h + 1), tl.load(tables[1] + 3 * i_h + 2)
    n_whole = n_rounds // TURN * TURN
    p_rows = tables[0] + tl.load(tables[1] + 3 * i_h) * BOOK
    o_w = tl.arange(0, b_acc[0].shape[0])
    b_scale = load_scales(fields[1], o_row, o_t, m_t).to(tl.float32)
    b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_sums = ()
    for i_g in tl.static_range(GROUPS):
        b_parts = ()
        for _ in tl.static_range(TILES):
            b_parts = b_parts + (tl.zeros([o_t.shape[0], b_acc[0].shape[0]], tl.float32),)
        for i_r in range(0, n_whole, TURN):
            i_code = i_g * n_rounds + i_r
            b_run = load_run(fields[0], i_h, s_head, o_row, o_t, m_t, i_first, i_code, TURN, BITS, META, WHOLE)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, TURN, BITS, WIDTH, SUM)
            p_rows += TURN * BOOK
        for i_r in range(n_whole, n_rounds):
            i_code = i_g * n_rounds + i_r
            b_run = load_run(fields[0], i_h, s_head, o_row, o_t, m_t, i_first, i_code, 1, BITS, META, False)
            b_parts = add_rounds(b_parts, p_rows, b_run, o_w, 1, BITS, WIDTH, SUM)
            p_rows += BOOK
        for j in tl.static_range(TILES):
            b_v = tl.trans(b_parts[j].to(DTYPE))
            b_sums = b_sums + (tl.dot(b_v, b_weights, b_acc[i_g * TILES + j], input_precision=PRECISION),)
    return b_sums


@triton.jit
def accumulate_bits(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Weighted sums of the bits of all heads, for values in the encoder form (section 4.1); tiles are by head."""
    b_scale = load_scales(fields[1], o_row, o_t, m_t).to(tl.float32)
    b_weights = (b_p * b_scale[:, None]).to(DTYPE)
    b_sums = ()
    HEADS: tl.constexpr = META.heads
    for i in tl.static_range(HEADS):
        o_head = o_row + (i - i_h) * s_head
        b_bits = load_codes(fields[0], fields[0], o_head, o_t, m_t, 1, META.words, META.padded, META.words)
        for j in tl.static_range(len(b_bits)):
            b_tile = tl.trans(b_bits[j].to(DTYPE))
            b_sums = b_sums + (tl.dot(b_tile, b_weights, b_acc[i * len(b_bits) + j], input_precision=PRECISION),)
    return b_sums


def commvq_side(codec: CommVQCodec) -> KernelSide:
    """Kernel operands of a CommVQ codec.

    Code space: of keys, pairs by group, real parts first; of values, channels or encoder bits.
    """
    if codec.books is None:
        heads, bits = codec.context.heads, codec.fields[0].shape[0] * 8
        output_map = in_code_order(codec.output_map(), (bits,) * heads).contiguous()
        widths = code_tiles(bits) * heads
        meta = Bits(words_per_token(bits), padded_words(bits), heads)
        return KernelSide(None, accumulate_bits, meta, widths, tokens=64, warps=8, output_map=output_map)
    books, groups, width = codec.books, codec.books.groups, codec.books.books.shape[-1]
    padded = max(16, triton.next_power_of_2(width))
    turn = rounds_at_once(books.code_bits) * books.code_bits
    whole = turn % 8 == 0 and (groups == 1 or all(count * books.code_bits % 8 == 0 for count in books.rounds))
    if codec.context.side == "values":
        form = Books(groups, books.index_bits, width, books.row, len(books.rounds) * books.row, whole)
        tile = min(padded, COLUMNS)
        widths = (tile,) * (groups * padded // tile)
        output_map = None
        if padded != width:
            output_map = _spread(torch.arange(codec.context.head_dim), groups, padded).to(books.books.device)
        few_rows = sums_side(books)
        return KernelSide(
            None, accumulate, form, widths, (books.books, books.places),
            tokens=TOKENS, warps=8, output_map=output_map, few_rows=few_rows,
        )  # fmt: skip
    return _key_side(codec, books, whole)


@on_cpu
def _key_side(codec: CommVQCodec, books: ResidualBooks, whole: bool) -> KernelSide:
    rope, width = codec.context.rope, books.books.shape[-1]
    assert rope is not None
    pairs = min(PART, max(16, triton.next_power_of_2(width)))
    split = -(-width // pairs)
    parts = books.groups * split
    form = KeyBooks(
        parts, split, pairs, width, rope.rotary, books.index_bits, books.row, len(books.rounds) * books.row, whole
    )
    channels = torch.tensor(rope.order).view(2, books.groups, width).transpose(0, 1)
    spread = _spread(channels, 2 * books.groups, split * pairs)
    spread = spread.view(books.groups, 2, split, pairs, -1).transpose(1, 2).flatten(0, 3).unsqueeze(0)
    query_map = spread.mT.contiguous().to(books.books.device)
    if codec.weights is not None:
        order = torch.tensor(rope.order, device=books.books.device)
        query_map = query_map / codec.weights.float().repeat(1, 2)[:, order.argsort(), None]
    side = KernelSide(
        score, None, form, (pairs,) * (2 * parts), (key_table(books.books, split, pairs), books.places),
        tokens=TOKENS, warps=8, query_map=query_map,
    )  # fmt: skip
    side.few_rows = replace(side, score=score_part, parts=parts)
    return side


def key_table(books: torch.Tensor, split: int, pairs: int) -> torch.Tensor:
    """Codebooks `[S, N, 2, g]` as the kernels read them: `[S, split, N, 2 * pairs]`, padded with zeros.

    A row has the real parts of four pairs, then their imaginary parts, and so on.
    """
    padded = torch.nn.functional.pad(books, (0, split * pairs - books.shape[-1]))
    quads = padded.unflatten(-1, (split, pairs // QUAD.value, QUAD.value))  # [S, N, 2, split, quads, 4]
    return quads.permute(0, 3, 1, 4, 2, 5).flatten(-3).contiguous()


def _spread(channels: torch.Tensor, tiles: int, padded: int) -> torch.Tensor:
    """Map `[1, tiles * padded, D]` to `tiles` runs of channels, each padded to `padded`."""
    rows = torch.eye(channels.numel())[channels.flatten()].view(tiles, -1, channels.numel())
    return torch.nn.functional.pad(rows, (0, 0, 0, padded - rows.shape[1])).flatten(0, 1).unsqueeze(0)
