"""QJL's device function for scores.

With sketches i of rows S_i, signs g_i[t] and stored scales c_i[t] (QJL, Definition 3.1):

    score:  s[t] = Σ_i c_i[t] ⟨S_i q, g_i[t]⟩
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import CODES_PER_WORD, words_per_token
from kvcache_compress.triton_kernels.common import assembly, in_place
from kvcache_compress.triton_kernels.common.codes import load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, with_mean

CHUNK_WORDS = 16
"""Words of a token that are unpacked at a time; 512 signs at once would spill registers."""


class Chunks(NamedTuple):
    """Constants of the chunks.

    field, words: the sketch's field and words per token. first, count, padded: first word, number of words, padded
    number. last: True for a sketch's last chunk; tile: the chunk's first tile. placed: True if bits stay in place
    (`in_place.placed`), because chunks fill the sketch; a constant tile after the last then subtracts the middle code.
    """

    field: tuple[int, ...]
    words: tuple[int, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    padded: tuple[int, ...]
    last: tuple[bool, ...]
    tile: tuple[int, ...]
    placed: tuple[bool, ...]


@triton.jit
def signs(
    fields, words, o_row, o_t, m_t,
    META: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Signs of a chunk as tiles of ±1/2 (see `codes.py`), or bits in place."""
    WORDS: tl.constexpr = META.words[AT]
    PADDED: tl.constexpr = META.padded[AT]
    COUNT: tl.constexpr = META.count[AT]
    PLACED: tl.constexpr = META.placed[AT]
    p_words = fields[META.field[AT]] + META.first[AT]
    if FAST and PLACED:
        b_signs = in_place.placed(p_words, words, o_row, o_t, m_t, 1, WORDS, PADDED, COUNT, False)
    else:
        b_bits = load_codes(p_words, p_words, o_row, o_t, m_t, 1, WORDS, PADDED, COUNT)
        if PLACED:
            b_signs = in_place.placed_codes(b_bits, PADDED, 1, DTYPE)
        else:
            b_signs = ()
            for j in tl.static_range(len(b_bits)):
                b_signs = b_signs + (b_bits[j].to(DTYPE) - 0.5,)
    if PLACED and META.last[AT]:
        b_signs = b_signs + (in_place.middle_tile(o_t.shape[0], 1, DTYPE, FAST),)
    return b_signs


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s[t] = Σ_i c_i[t] ⟨S_i q, g_i[t]⟩ (Definition 3.1)"""
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    b_sketch = b_s
    for i in tl.static_range(len(META.field)):
        b_signs = signs(fields, words, o_row, o_t, m_t, META, i, b_q[0].dtype, FAST)
        for j in tl.static_range(len(b_signs)):
            b_sketch = tl.dot(b_signs[j], b_q[META.tile[i] + j], b_sketch, input_precision="ieee")
        if META.last[i]:
            b_scale = load_scales(fields[META.field[i] + 1], o_row, o_t, m_t).to(tl.float32)
            if META.placed[i] and FAST:
                b_scale *= 1 / in_place.UNIT
            b_s += b_sketch * b_scale[:, None]
            b_sketch = tl.zeros_like(b_s)
    return b_s


def qjl_side(basis: torch.Tensor, counts: Sequence[int], mean: torch.Tensor | None) -> KernelSide:
    """Kernel operands of sketches of `counts` rows each of `basis` `[H or 1, W, D]`, and `mean` `[H, D]`, if any."""
    meta, widths, parts = [], [], []
    for index, rows in enumerate(basis.split([*counts], 1)):
        words = words_per_token(rows.shape[1])
        rows = 2 * rows.unflatten(1, (CODES_PER_WORD, words))
        placed = words % CHUNK_WORDS == 0
        middle = []
        for first in range(0, words, CHUNK_WORDS):
            count = min(CHUNK_WORDS, words - first)
            padded = max(2, triton.next_power_of_2(count))
            last = first + count == words
            meta.append((2 * index, words, first, count, padded, last, len(widths), placed))
            chunk = rows.new_zeros(len(rows), CODES_PER_WORD, padded, rows.shape[-1])
            chunk[:, :, :count] = rows[:, :, first : first + count]
            chunk = chunk.flatten(1, 2)
            widths += code_tiles(CODES_PER_WORD * count)
            if placed:
                chunk, share = in_place.in_place(chunk, 1, keys=True).split([chunk.shape[1], 16], 1)
                middle.append(share)
            parts.append(chunk)
        if placed:
            parts.append(torch.stack(middle).sum(0))
            widths.append(16)
    return KernelSide(
        score,
        Chunks(*zip(*meta, strict=True)),
        tuple(widths),
        words=assembly.places(CHUNK_WORDS).to(basis.device),
        places=CHUNK_WORDS,
        matrix=with_mean(torch.cat(parts, 1).mT, mean),
        headroom=in_place.HEADROOM,
    )
