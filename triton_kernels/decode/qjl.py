"""QJL's device function for scores.

With sketches i of rows S_i, signs g_i[t] and stored scales c_i[t] (QJL, Definition 3.1):

    score:  s[t] = Σ_i c_i[t] ⟨S_i q, g_i[t]⟩
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import CODES_PER_WORD, words_per_token
from kvcache_compress.triton_kernels.common import assembly, in_place
from kvcache_compress.triton_kernels.common.codes import Codes, load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, with_mean

CHUNK_WORDS = 16
"""Words of a token that are unpacked at a time; 512 signs at once would spill registers."""


class Chunk(NamedTuple):
    """Constants of a chunk: its signs, and its first tile of code space.

    last: True for a sketch's last chunk. placed: True if bits stay in place (`in_place.placed`), because chunks fill
    the sketch; a constant tile after the last then subtracts the middle code.
    """

    codes: Codes
    tile: int
    last: bool
    placed: bool


class Chunks(NamedTuple):
    """All chunks."""

    parts: tuple[Chunk, ...]


@triton.jit
def signs(tile, META: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Signs of chunk `AT` as tiles of ±1/2 (see `codes.py`), or bits in place."""
    CHUNK: tl.constexpr = META.parts[AT]
    CODES: tl.constexpr = CHUNK.codes
    if FAST and CHUNK.placed:
        b_signs = in_place.placed(tile, CODES, False)
    elif CHUNK.placed:
        b_signs = in_place.placed_codes(tile, CODES, DTYPE)
    else:
        b_signs = ()
        b_bits = load_codes(tile, CODES)
        for j in tl.static_range(len(b_bits)):
            b_signs = b_signs + (b_bits[j].to(DTYPE) - 0.5,)
    if CHUNK.placed and CHUNK.last:
        b_signs = b_signs + (in_place.middle_tile(tile.o_t.shape[0], 1, DTYPE, FAST),)
    return b_signs


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = Σ_i c_i[t] ⟨S_i q, g_i[t]⟩ (Definition 3.1)"""
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    b_sketch = b_s
    for i in tl.static_range(len(META.parts)):
        b_signs = signs(tile, META, i, b_q[0].dtype, FAST)
        for j in tl.static_range(len(b_signs)):
            b_sketch = tl.dot(b_signs[j], b_q[META.parts[i].tile + j], b_sketch, input_precision="ieee")
        if META.parts[i].last:
            b_scale = load_scales(tile.fields[META.parts[i].codes.field + 1], tile).to(tl.float32)
            if META.parts[i].placed and FAST:
                b_scale *= 1 / in_place.UNIT
            b_s += b_sketch * b_scale[:, None]
            b_sketch = tl.zeros_like(b_s)
    return b_s


def qjl_side(basis: torch.Tensor, counts: Sequence[int], mean: torch.Tensor | None) -> KernelSide:
    """Kernel operands of sketches of `counts` rows each of `basis` `[H or 1, W, D]`, and `mean` `[H, D]`, if any."""
    chunks, widths, parts = [], [], []
    for index, rows in enumerate(basis.split([*counts], 1)):
        words = words_per_token(rows.shape[1])
        rows = 2 * rows.unflatten(1, (CODES_PER_WORD, words))
        placed = words % CHUNK_WORDS == 0
        middle = []
        for first in range(0, words, CHUNK_WORDS):
            count = min(CHUNK_WORDS, words - first)
            padded = max(2, triton.next_power_of_2(count))
            last = first + count == words
            chunks.append(Chunk(Codes(1, 2 * index, words, first, count, padded), len(widths), last, placed))
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
        Chunks(tuple(chunks)),
        tuple(widths),
        words=assembly.places(CHUNK_WORDS).to(basis.device),
        places=CHUNK_WORDS,
        matrix=with_mean(torch.cat(parts, 1).mT, mean),
        headroom=in_place.HEADROOM,
    )
