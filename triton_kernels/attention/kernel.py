"""Decode attention over `sinks | packed | tail`: one split-KV kernel for any pair of codecs.

A program takes up to `M` query rows of one key/value head (of all query heads in its group) and one split of the packed
tokens; the first programs share the dense segments. It keeps the reference m, sum l and accumulators of an online
softmax (FlashDecoding). The reference is the largest logit, or up to `HEADROOM` above it. `merge.py` combines the
splits.

Tensor-core rows are tokens in the score product and channels in the value product; the eight columns are queries in
both (`S^T = K Q^T`, `acc^T += V^T P^T`). As rows, the four queries that usually share a head would fill a quarter of a
tile.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcache_compress.triton_kernels.common.codes import PackedTile, in_block
from kvcache_compress.triton_kernels.common.eras import era_part

LOG2E = tl.constexpr(math.log2(math.e))
HEADROOM = tl.constexpr(4)
"""Margin, in units of log 2, by which the softmax reference is set above the largest logit when it must rise."""
DENSE_BLOCK = tl.constexpr(16)
"""Tokens per tile of the dense segments."""
DENSE = tl.constexpr(4)
"""Programs that share out the tiles of the dense segments, usually up to seven; a power of two."""
NO_MASK, BOOL_MASK, FLOAT_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SINKS, TAIL, FIELDS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Indices into a side's tuple of memory: its dense segments, then its packed fields."""


class Masking(NamedTuple):
    """Constants of the logits: kind of mask, whether they are capped, whether new tokens need a causal mask.

    shared: True if all rows of a program have the same mask.
    """

    kind: int
    softcap: bool
    causal: bool
    shared: bool


class Rows(NamedTuple):
    """Query rows `[M]` of a program, and the mask and cap of their logits.

    o_mask, s_mask: start of each row's mask, 0 if all share one, and its stride over tokens; o_query: position of the
    row's query in the step; count: tokens before the first query.
    """

    p_mask: Any
    o_mask: Any
    s_mask: Any
    o_query: Any
    count: Any
    softcap: Any


@triton.jit
def operand_place(o_w):
    """Place of column `o_w` of mapped queries in memory: of each 16 columns, those of a lane lie side by side.

    The lanes of a row of the tensor cores' operand hold columns 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 in turn.
    """
    return o_w // 16 * 16 + o_w % 8 // 2 * 4 + o_w % 16 // 8 * 2 + o_w % 2


@triton.jit
def query_tiles(p_mapped, o_r, m_r, SIDE: tl.constexpr):
    """Load tiles `[width, M]` of queries `o_r` `[M / 8, 8]`, stored as `operand_place` says; `fours` keep that order.

    A lane loads what it holds as an operand of the tensor cores. In the order of columns the compiler would move the
    queries between lanes in every iteration.
    """
    M: tl.constexpr = 8 * o_r.shape[0]
    b_tiles, base = (), 0
    for i in tl.static_range(len(SIDE.widths)):
        o_w = tl.arange(0, SIDE.widths[i] // 16)[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4
        o_w += tl.arange(0, 4)[None, None, :]
        o_q = (o_r * total(SIDE.widths))[:, :, None, None, None] + o_w[None, None, :, :, :]
        b_q = tl.load(p_mapped + base + o_q, mask=m_r[:, :, None, None, None], other=0.0)
        if not SIDE.fours[i]:
            b_q = tl.permute(tl.reshape(b_q, [M // 8, 8, SIDE.widths[i] // 16, 4, 2, 2]), [0, 1, 2, 4, 3, 5])
        b_tiles = b_tiles + (tl.trans(tl.reshape(b_q, [M, SIDE.widths[i]])),)
        base += SIDE.widths[i]
    return b_tiles


@triton.constexpr_function
def padded(dim):
    """Columns of a tile of dense tokens."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.constexpr_function
def total(widths):
    """Columns of a code space."""
    return sum(widths)


@triton.constexpr_function
def _powers(count):
    """Starts and lengths of the runs of powers of two that make up `count`, longest first."""
    powers = [1 << i for i in reversed(range(count.bit_length())) if count >> i & 1]
    return tuple((sum(powers[:i]), power) for i, power in enumerate(powers))


@triton.jit
def _words(tables, COUNT: tl.constexpr, PLACES: tl.constexpr):
    """Load a side's words, the last of its tables: `COUNT` as tiles `[1, 1]`, then `PLACES` in rows of powers of two.

    Loaded before the loop they stay in registers, and broadcasting them costs nothing.
    """
    b_words = ()
    for i in tl.static_range(COUNT):
        b_words = b_words + (tl.load(tables[len(tables) - 1] + i + tl.zeros([1, 1], tl.int32)),)
    ROWS: tl.constexpr = _powers(PLACES)
    for i in tl.static_range(len(ROWS)):
        o_w = COUNT + ROWS[i][0] + tl.arange(0, ROWS[i][1])
        b_words = b_words + (tl.load(tables[len(tables) - 1] + o_w[None, :]),)
    return b_words


@triton.jit
def _logits(
    b_s, rows, o_t, m_t, first, MASKING: tl.constexpr, KIND: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr
):
    """Capped and masked logits, in units of log 2; `first` is the position of the segment's first token."""
    if MASKING.softcap:
        b_s = rows.softcap * (2 * tl.sigmoid(2 * b_s / rows.softcap) - 1)
    if KIND != NO_MASK:
        # One number per token where rows share it: a tile of them would be moved between threads.
        if MASKING.shared:
            p_mask, m_s = rows.p_mask + (first + o_t) * rows.s_mask, m_t
        else:
            p_mask = rows.p_mask + rows.o_mask[None, :] + (first + o_t)[:, None] * rows.s_mask
            m_s = m_t[:, None]
        b_mask = tl.load(p_mask, mask=m_s, other=0)
        if MASKING.shared:
            b_mask = b_mask[:, None]
        if KIND == BOOL_MASK:
            b_s = tl.where(b_mask != 0, b_s, float("-inf"))
        else:
            b_s += b_mask.to(tl.float32) * LOG2E
    elif CAUSAL:
        b_s = tl.where((first + o_t)[:, None] <= (rows.count + rows.o_query)[None, :], b_s, float("-inf"))
    if not EVEN and KIND != BOOL_MASK:
        b_s = tl.where(m_t[:, None], b_s, float("-inf"))
    return b_s


@triton.jit
def _finite(b_m):
    """Softmax reference, or 0 in rows without any logit so far."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@triton.jit
def _dense_segment(
    b_q, p_k, p_v, tokens, rows, first, i_tile, ring, scaling, b_m, b_l, b_acc,
    K: tl.constexpr, V: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr,
    RING: tl.constexpr = False,
):  # fmt: skip
    """Online softmax over every `DENSE`-th tile of dense tokens, from tile `i_tile` on.

    With RING, they lie in a circular buffer: `ring` is the slot of the first, and how many there are.

    With FAST, 16-bit queries and keys are multiplied as 16-bit operands, which loses nothing. Weights are multiplied in
    TF32, which holds 16-bit values exactly and keeps more bits of the weights than 16 bits do; float32 needs `ieee`.
    """
    PRECISION: tl.constexpr = "tf32" if FAST else "ieee"
    o_k, o_v = tl.arange(0, padded(K.dim)), tl.arange(0, padded(V.dim))
    m_k, m_v = (o_k < K.dim)[None, :], (o_v < V.dim)[None, :]
    # With three stages the compiler keeps the next values in registers, and each iteration takes a third longer. With
    # two, registers spill where queries and sums fill them: at D = 256, and with 16 rows at D = 128.
    STAGES: tl.constexpr = 1 if FAST and (K.dim + V.dim) * b_m.shape[0] > 2048 else 2
    for start in tl.range(i_tile * DENSE_BLOCK, tokens, DENSE * DENSE_BLOCK, num_stages=STAGES):
        o_t = start + tl.arange(0, DENSE_BLOCK)
        m_t = o_t < tokens
        o_row = (ring[0] + o_t) % ring[1] if RING else o_t
        b_k = tl.load(p_k + o_row[:, None] * K.dim + o_k[None, :], mask=m_t[:, None] & m_k, other=0.0)
        if FAST and b_k.dtype == b_q.dtype:
            b_s = tl.dot(b_k, b_q, input_precision=PRECISION)
        else:
            b_s = tl.dot(b_k.to(tl.float32), b_q.to(tl.float32), input_precision=PRECISION)
        b_s = _logits(b_s * scaling, rows, o_t, m_t, first, MASKING, MASKING.kind, CAUSAL, False)
        b_new = tl.maximum(b_m, tl.max(b_s, 0))
        b_safe = _finite(b_new)
        b_p = tl.exp2(b_s - b_safe[None, :])
        b_factor = tl.exp2(b_m - b_safe)
        b_m, b_l = b_new, b_l * b_factor + tl.sum(b_p, 0)
        b_v = tl.load(p_v + o_row[:, None] * V.dim + o_v[None, :], mask=m_t[:, None] & m_v, other=0.0)
        b_v = tl.trans(b_v.to(tl.float32))
        b_acc = tl.dot(b_v, b_p, b_acc * b_factor[None, :], input_precision=PRECISION)
    return b_m, b_l, b_acc


@triton.jit
def _packed_tile(
    b_q, keys, values, rows, start, n_sinks, b_factor, b_bias, b_m, b_l, b_acc,
    SCORE: tl.constexpr, ACCUMULATE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, MASKING: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Online softmax over the packed tokens of a tile, of which `start` is the first."""
    # Logits are computed relative to the reference, unless a cap or an additive mask may put them far from it.
    KIND: tl.constexpr = MASKING.kind
    ABSOLUTE: tl.constexpr = MASKING.softcap or KIND == FLOAT_MASK
    BLOCK: tl.constexpr = keys.o_t.shape[0]
    K_META: tl.constexpr = K.meta
    V_META: tl.constexpr = V.meta
    b_s = SCORE(b_q, keys, K_META, FAST)
    b_base = tl.zeros_like(b_m) if ABSOLUTE else _finite(b_m)
    b_offset = b_bias - b_base if K.bias else -b_base
    b_s = b_s * b_factor[None, :] + b_offset[None, :]
    b_s = _logits(b_s, rows, keys.o_t, keys.m_t, n_sinks + start, MASKING, KIND, False, EVEN)
    b_tops = tl.max(tl.reshape(b_s, [BLOCK // 8, 8, b_m.shape[0]]), 0)
    m_larger = b_tops > (b_m - b_base)[None, :]
    if tl.max(m_larger.to(tl.int32)) > 0:
        b_top = tl.max(b_tops, 0)
        b_new = tl.where(b_top > b_m - b_base, b_base + b_top + HEADROOM, b_m)
        if not ABSOLUTE:
            b_s += (b_base - _finite(b_new))[None, :]
        b_decay = tl.exp2(b_m - _finite(b_new))
        b_l *= b_decay[None, :]
        b_acc = [b_sum * b_decay[None, :] for b_sum in b_acc]
        b_m = b_new
    if ABSOLUTE:
        b_s -= _finite(b_m)[None, :]
    b_p = tl.exp2(b_s)
    b_l += tl.sum(tl.reshape(b_p, [BLOCK // 8, 8, b_m.shape[0]]), 0)
    return b_m, b_l, ACCUMULATE(b_p, values, b_acc, V_META, DTYPE, FAST)


# Triton recompiles for integers that are 1 or divisible by 16, and these come and go as tokens arrive. They are not in
# the sides' tuples because `do_not_specialize` cannot name members of tuples. `s_mask_t` is one of them for another
# reason: if it were known to be 1, lanes would lie along a mask's tokens: fewer sectors, but an offset per row in each.
_GROWING = (
    "n_sinks", "n_packed", "n_tail", "k_capacity", "v_capacity", "k_tail_capacity", "v_tail_capacity", "rope_capacity",
    "split_tokens", "s_mask_b", "s_mask_h", "s_mask_n", "s_mask_t", "s_packed", "ring",
)  # fmt: skip


@triton.jit(do_not_specialize=_GROWING)
def attend_kernel(
    p_q, p_mapped, p_rows, p_shift, keys, values, k_tables, v_tables, p_rope, p_mask, p_packed, p_acc, p_dense, p_stats,
    n_sinks, n_packed, n_tail, k_capacity, v_capacity, k_tail_capacity, v_tail_capacity, rope_capacity, split_tokens,
    s_mask_b, s_mask_h, s_mask_n, s_mask_t, s_packed, ring, scaling, softcap, G, N,
    SCORE: tl.constexpr, ACCUMULATE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, MASKING: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, BOUNDED: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    FAST: tl.constexpr, PAGE: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
):  # fmt: skip
    """Attend `M` query rows to one split of the packed tokens, or to the dense segments (FlashDecoding).

        s = SCORE(q', fields) · factor + bias,  p = 2^(s - m),  l += Σ p,  acc = ACCUMULATE(p, fields, acc)

    `keys` and `values` are each side's memory, from `SINKS` to `FIELDS`, with `capacity` packed tokens and
    `tail_capacity` tokens in the tail; `k_tables` and `v_tables` its constant tensors, `K` and `V` its `SideForm`.
    Turned queries have rows of their own for each group of tokens, and a constant each in `p_shift` (`spectral.py`).
    With eras, `p_packed` are `KernelSide.eras`, and a split lies in one.

    With `BOUNDED`, numbers of tokens are in memory: before each sequence's number of packed tokens, `p_packed` has its
    row of the dense tokens and its sinks, after it its tail tokens, which lie in a circle of `ring` slots. With `PAGE`
    tokens in a page, the pages' blocks follow. A tile lies in one page.
    """
    i_h, i_b = tl.program_id(1) // ROW_BLOCKS, tl.program_id(2)
    splits = tl.num_programs(0) - DENSE
    # The programs of the dense segments, from number `splits` on, come first, so that none of them comes last.
    i_s = (tl.program_id(0) + splits) % (splits + DENSE)
    i_bh = i_b.to(tl.int64) * (tl.num_programs(1) // ROW_BLOCKS) + i_h
    DTYPE: tl.constexpr = tl.float32 if p_q.dtype.element_ty == tl.float32 else tl.float16
    K_WIDTH: tl.constexpr = total(K.widths)
    V_WIDTH: tl.constexpr = total(V.widths)
    TURNED: tl.constexpr = K.group > 1
    n_rows = G * N
    o_r = tl.program_id(1) % ROW_BLOCKS * M + tl.arange(0, M)
    m_r = o_r < n_rows
    p_mask += i_b.to(tl.int64) * s_mask_b
    o_m = 0
    if not MASKING.shared:
        # Offsets of 64 bits, or a test of each row, would spill registers. Missing rows read the last row's mask.
        o_near = tl.minimum(o_r, n_rows - 1)
        p_mask += i_h.to(tl.int64) * G * s_mask_h
        o_m = o_near // N * s_mask_h + o_near % N * s_mask_n
    n_filled, i_dense, slot_sinks = n_packed, i_bh, n_sinks
    if BOUNDED:
        p_packed += i_b * s_packed
        # All programs share what is there, however much there is room for.
        n_filled = tl.minimum(n_packed, tl.load(p_packed).to(tl.int32))
        i_dense = tl.load(p_packed - 2) * (tl.num_programs(1) // ROW_BLOCKS) + i_h
        n_sinks, n_tail = tl.load(p_packed - 1).to(tl.int32), tl.load(p_packed + 1).to(tl.int32)
        n_packed = n_filled
    rows = Rows(p_mask, o_m, s_mask_t, o_r % N, n_sinks + n_packed + n_tail - N, softcap)
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_total = tl.zeros([M], tl.float32)
    if i_s < splits:
        # Eight partial sums, of every eighth token each: sums over different threads wait until after the loop.
        b_l = tl.zeros([8, M], tl.float32)
        i_k, i_row = i_h, i_bh
        if K.eras:
            i_era, first, stop = era_part(p_packed, i_s, n_packed, split_tokens, 1, 1)
            heads = tl.num_programs(1) // ROW_BLOCKS
            i_k += i_era * heads
            if not TURNED:
                i_row = i_b.to(tl.int64) * (tl.load(p_packed) * heads) + i_k
        p_rows += i_row * n_rows * 2
        b_factor = tl.load(p_rows + o_r * 2, mask=m_r, other=0.0)
        b_bias = tl.load(p_rows + o_r * 2 + 1, mask=m_r, other=0.0)
        if not TURNED:
            p_mapped += i_row * n_rows * K_WIDTH
        b_acc = ()
        for i in tl.static_range(len(V.widths)):
            b_acc = b_acc + (tl.zeros([tl.constexpr(V.widths[i]), M], tl.float32),)
        k_words = _words(k_tables, K.words, K.places)
        v_words = _words(v_tables, V.words, V.places)
        if K.rope:
            p_rope += i_b.to(tl.int64) * rope_capacity * K.rope
        if BOUNDED:
            split_tokens = tl.cdiv(n_filled, splits * BLOCK) * BLOCK
        if not K.eras:
            stop = tl.minimum(i_s * split_tokens + split_tokens, n_filled)
            first = i_s * split_tokens
        o_keys, o_values = i_bh * k_capacity, i_bh * v_capacity
        o_row = tl.program_id(1) % ROW_BLOCKS * M + tl.arange(0, M // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
        if not TURNED:
            b_q = query_tiles(p_mapped, o_row, o_row < n_rows, K)
        for start in range(first, stop, BLOCK):
            if TURNED:
                o_group = (i_bh * (k_capacity // K.group) + start // K.group) * n_rows
                b_group = query_tiles(p_mapped + o_group * K_WIDTH, o_row, o_row < n_rows, K)
                b_group = b_group + (tl.load(p_shift + o_group + o_r, mask=m_r, other=0.0),)
            else:
                b_group = b_q
            o_t = tl.arange(0, BLOCK)
            m_t = tl.full([BLOCK], True, tl.int1) if EVEN else start + o_t < stop
            i_block, k_rows, v_rows = i_bh, k_capacity, v_capacity
            o_k, o_v = o_keys + start, o_values + start
            if PAGE:
                i_block = tl.load(p_packed + 2 + start // PAGE)
                k_rows, v_rows = PAGE, PAGE
                o_k = i_h.to(tl.int64) * PAGE + start % PAGE
                o_v = o_k
            k_tile = PackedTile(
                in_block(keys[FIELDS:], i_block, K_STRIDES), k_tables, k_words, p_rope + start // K.group * K.rope,
                i_k, k_rows, o_k, o_t, m_t,
            )  # fmt: skip
            v_tile = PackedTile(
                in_block(values[FIELDS:], i_block, V_STRIDES), v_tables, v_words, p_rope, i_h, v_rows, o_v, o_t, m_t
            )
            b_m, b_l, b_acc = _packed_tile(
                b_group, k_tile, v_tile, rows, start, n_sinks, b_factor, b_bias, b_m, b_l, b_acc,
                SCORE, ACCUMULATE, K, V, MASKING, EVEN, DTYPE, FAST,
            )  # fmt: skip
        b_total = tl.sum(b_l, 0)
        p_acc += ((i_bh * splits + i_s) * n_rows) * V_WIDTH
        base = 0
        for i in tl.static_range(len(V.widths)):
            o_w = base + tl.arange(0, V.widths[i])
            tl.store(p_acc + o_r[None, :] * V_WIDTH + o_w[:, None], b_acc[i], mask=m_r[None, :])
            base += V.widths[i]
    else:
        o_k, o_v = tl.arange(0, padded(K.dim)), tl.arange(0, padded(V.dim))
        p_q += i_bh * n_rows * K.dim
        m_q = m_r[None, :] & (o_k < K.dim)[:, None]
        b_query = tl.load(p_q + o_r[None, :] * K.dim + o_k[:, None], mask=m_q, other=0.0)
        b_dense = tl.zeros([padded(V.dim), M], tl.float32)
        i_d = (i_s - splits) & (DENSE - 1)  # masked, so that the compiler knows that it is not negative
        b_m, b_total, b_dense = _dense_segment(
            b_query, keys[SINKS] + i_dense * slot_sinks * K.dim, values[SINKS] + i_dense * slot_sinks * V.dim, n_sinks,
            rows, 0, i_d, (0, 1), scaling, b_m, b_total, b_dense, K, V, MASKING, MASKING.causal and BOUNDED, FAST,
        )  # fmt: skip
        b_m, b_total, b_dense = _dense_segment(
            b_query, keys[TAIL] + i_dense * k_tail_capacity * K.dim,
            values[TAIL] + i_dense * v_tail_capacity * V.dim, n_tail,
            rows, n_sinks + n_packed, (i_d + DENSE - 1) & (DENSE - 1), (n_packed % ring, ring), scaling,
            b_m, b_total, b_dense, K, V, MASKING, MASKING.causal, FAST, BOUNDED,
        )  # fmt: skip
        p_dense += (i_bh * DENSE + i_d) * n_rows * V.dim
        tl.store(p_dense + o_r[None, :] * V.dim + o_v[:, None], b_dense, mask=m_r[None, :] & (o_v < V.dim)[:, None])
    p_stats += ((i_bh * (splits + DENSE) + i_s) * n_rows + o_r) * 2
    tl.store(p_stats, b_m, mask=m_r)
    tl.store(p_stats + 1, b_total, mask=m_r)
