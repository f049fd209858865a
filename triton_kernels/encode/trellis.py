"""Viterbi's algorithm for trellis codes, the twin of `best_path` in `codecs/quantizers/trellis.py`.

A state holds the last six bits of the stream, the newest on top; here torch's state numbers are bit-reversed. The 64
states of a token lie in eight registers of eight lanes. Each new bit replaces the oldest, so costs move between lanes
only if the oldest is one of the three lane bits; each word ends by reordering them.

Every path keeps a history: the bits that left its register, a word for up to 32 numbers. So tracing back takes one
lookup per block of 32 numbers and yields the bits of all its codes at once.
"""

import triton
import triton.language as tl

from kvcache_compress.codecs.quantizers import trellis

STATES = tl.constexpr(trellis.STATES)
UNREACHABLE = tl.constexpr(trellis.UNREACHABLE)
WARM_WORDS = tl.constexpr(trellis.WARM_UP // 8)
STEPS = tl.constexpr(trellis.STEPS)
BLOCK_WORDS = tl.constexpr(4)
"""Words of eight numbers in a block."""
TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""float32 of this size have no fraction: adding and subtracting it rounds to whole numbers, halves to even ones."""


@triton.jit
def least_errors(b_x, units):
    """Squared errors, less `b_x` squared, of each of the four subsets' nearest level.

    `units` are the levels; `b_x` and they are int32, in the same units.
    """
    b_errors = ()
    for i in tl.static_range(4):
        b_level = tl.zeros_like(b_x) + units[i]
        for j in tl.static_range(4 + i, len(units), 4):
            b_level = tl.where(2 * b_x > units[j - 4] + units[j], units[j], b_level)
        b_errors = b_errors + (b_level * (b_level - 2 * b_x),)
    return b_errors


@triton.jit
def places():
    """Numbers of the states' places in a tile `[8, T, 8]`: int32 `[8, 1, 8]`."""
    return tl.arange(0, 8)[:, None, None] + (8 * tl.arange(0, 8))[None, None, :]


@triton.jit
def across(b_tile, BIT: tl.constexpr):
    """Exchange the members of a tile `[8, T, 8]` whose places' numbers differ in bit `BIT` alone."""
    T: tl.constexpr = b_tile.shape[1]
    if BIT < 3:
        b_pairs = tl.reshape(b_tile, [4 >> BIT, 2, 1 << BIT, T, 8])
        b_pairs = tl.sum(b_pairs, 1, keep_dims=True) - b_pairs
    else:
        b_pairs = tl.reshape(b_tile, [8, T, 32 >> BIT, 2, 1 << (BIT - 3)])
        b_pairs = tl.sum(b_pairs, 3, keep_dims=True) - b_pairs
    return tl.reshape(b_pairs, [8, T, 8])


@triton.jit
def by_age(b_tile):
    """Put states `[8, T, 8]` in order after a word, whose last two bits are the lowest of their places."""
    T: tl.constexpr = b_tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(b_tile, [2, 4, T, 2, 4]), [4, 0, 2, 1, 3]), [8, T, 8])


@triton.jit
def next_number(b_cost, b_left, b_x, units, bit, STEP: tl.constexpr):
    """Costs and histories of all states after number `STEP` of a word, whose bit in the histories is `bit`."""
    o_s = places()
    m_upper = (o_s >> (STEP % 6)) & 1 == 1
    b_left |= tl.where(m_upper, bit, 0)
    b_0, b_1, b_2, b_3 = least_errors(b_x, units)
    m_high = ((o_s >> ((STEP + 4) % 6)) ^ (o_s >> ((STEP + 2) % 6))) & 1 == 1
    m_low = (o_s >> ((STEP + 5) % 6)) & 1 == 1
    b_0, b_1 = tl.where(m_high, b_2, b_0), tl.where(m_high, b_3, b_1)
    b_other = across(b_cost, STEP % 6) + tl.where(m_low, b_0, b_1)
    b_cost += tl.where(m_low, b_1, b_0)
    # Of equal paths torch chooses the one whose leaving bit is 0.
    m_other = tl.where(m_upper, b_other <= b_cost, b_other < b_cost)
    return tl.minimum(b_other, b_cost), tl.where(m_other, across(b_left, STEP % 6), b_left)


@triton.jit
def histories(b_cost, b_lower, b_upper, units, start, stop, WORDS: tl.constexpr):
    """Costs and histories `[8, T, 8]` after words `[start, stop)`, at most four; the first follows the last one.

    `b_lower` and `b_upper` `[1, T, PADDED]` have four numbers of a word in each int64.
    """
    o_w = tl.arange(0, b_lower.shape[2])[None, None, :]
    b_left = tl.zeros_like(b_cost)
    bit = 1
    for word in range(start, stop):
        m_word = o_w == word % WORDS
        b_low = tl.sum(tl.where(m_word, b_lower, 0), 2, keep_dims=True)
        b_high = tl.sum(tl.where(m_word, b_upper, 0), 2, keep_dims=True)
        for i in tl.static_range(8):
            b_x = ((b_low if i < 4 else b_high) << (48 - 16 * (i % 4)) >> 48).to(tl.int32)
            b_cost, b_left = next_number(b_cost, b_left, b_x, units, bit << i, i)
        b_cost, b_left = by_age(b_cost), by_age(b_left)
        bit = bit << 8
    return b_cost, b_left


@triton.jit
def sum_of(m_places, b_tile):
    """Sums `[T]` over the states that a mask marks."""
    return tl.sum(tl.sum(tl.where(m_places, b_tile, 0), 2), 0)


@triton.jit
def best_path(b_z, p_units, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Codes and indices of their levels, int32 `[T, 8, PADDED]`, closest to unit vectors `b_z`.

    `p_units` are the levels, int32 `[2 ** (BITS + 1)]`, in whole steps.
    """
    T: tl.constexpr = b_z.shape[0]
    WARM: tl.constexpr = WARM_WORDS if WARM_WORDS < WORDS else WORDS
    BYTES: tl.constexpr = BLOCK_WORDS if BLOCK_WORDS < PADDED else PADDED
    BLOCKS: tl.constexpr = PADDED // BYTES
    SCALE: tl.constexpr = STEPS * (8 * WORDS) ** 0.5
    units = ()
    for i in tl.static_range(2 ** (BITS + 1)):
        units = units + (tl.load(p_units + i),)
    b_x = ((b_z * SCALE + TO_WHOLE) - TO_WHOLE).to(tl.int32)
    b_quads = tl.reshape(b_x.to(tl.int64) & 0xFFFF, [T, 2, 4, PADDED])
    b_quads = tl.sum(b_quads << (16 * tl.arange(0, 4))[None, None, :, None], 2)
    b_lower, b_upper = tl.split(tl.permute(b_quads, [0, 2, 1]))
    b_lower, b_upper = b_lower[None, :, :], b_upper[None, :, :]
    o_s = places()
    o_b = tl.arange(0, BLOCKS)[:, None, None, None]

    # The state at the ends of the token, from the numbers on both sides of them.
    b_cost = tl.zeros([8, T, 8], tl.int32)
    b_cost, b_left = histories(b_cost, b_lower, b_upper, units, WORDS - WARM, WORDS + WARM, WORDS)
    b_rank = ((o_s & 1) << 5) | ((o_s & 2) << 3) | ((o_s & 4) << 1)
    b_rank |= ((o_s >> 1) & 4) | ((o_s >> 3) & 2) | ((o_s >> 5) & 1)
    b_rank += b_cost.to(tl.int64) * STATES  # of equal costs the first of torch's states
    m_best = b_rank == tl.min(tl.min(b_rank, 2), 0)[None, :, None]
    b_last = sum_of(m_best, (o_s.to(tl.int64) << (16 * WARM)) | (b_left.to(tl.int64) & (2**32 - 1)))
    b_last = (b_last >> (8 * WARM)) & (STATES - 1)

    b_cost = tl.where(o_s == b_last[None, :, None], 0, UNREACHABLE)
    b_kept = tl.zeros([BLOCKS, 8, T, 8], tl.int32)
    for first in range(0, WORDS, BYTES):
        stop = first + BYTES if first + BYTES < WORDS else WORDS
        b_cost, b_left = histories(b_cost, b_lower, b_upper, units, first, stop, WORDS)
        b_kept = tl.where(o_b == first // BYTES, b_left[None, :, :, :], b_kept)

    b_stream = tl.zeros([T, BLOCKS], tl.int64)  # a block's bits above the six before it
    stop = WORDS
    for _ in range((WORDS + BYTES - 1) // BYTES):
        block = (stop - 1) // BYTES
        b_bits = sum_of(o_s == b_last[None, :, None], tl.sum(tl.where(o_b == block, b_kept, 0), 0))
        b_bits = (b_bits.to(tl.int64) & (2**32 - 1)) | (b_last << (8 * (stop - block * BYTES)))
        b_stream = tl.where(tl.arange(0, BLOCKS)[None, :] == block, b_bits[:, None], b_stream)
        b_last = b_bits & (STATES - 1)
        stop = block * BYTES

    b_stream = (b_stream[:, :, None] >> (8 * tl.arange(0, BYTES))[None, None, :]).to(tl.int32)
    b_stream = tl.reshape(b_stream, [T, 1, PADDED]) >> tl.arange(0, 8)[None, :, None]
    b_bit = (b_stream >> 6) & 1
    b_subset = (b_stream >> 6) ^ (b_stream >> 5) ^ b_stream
    b_subset = (b_subset & 1) | (((b_stream >> 4) ^ (b_stream >> 2)) & 1) << 1
    b_choice = tl.zeros_like(b_x)
    for i in tl.static_range(2 ** (BITS - 1) - 1):
        b_middle = tl.load(p_units + 4 * i + b_subset) + tl.load(p_units + 4 * i + 4 + b_subset)
        b_choice += (2 * b_x > b_middle).to(tl.int32)
    return b_choice << 1 | b_bit, b_choice << 2 | b_subset
