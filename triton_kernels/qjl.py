"""QJL's score; its encoder is TurboQuant's, a sketch being a component of one bit.

With sketches i of rows S_i, signs g_i[t] and stored scales c_i[t] (QJL, Definition 3.1):

    score:  s[t] = Σ_i c_i[t] ⟨S_i q, g_i[t]⟩
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layout import CODES_PER_WORD, words_per_token
from .operands import KernelSide, with_mean

if TYPE_CHECKING:
    from ..methods.qjl import QJLCodec

CHUNK_WORDS = 16
"""Words of a token that are unpacked at a time; 512 signs at once take more registers than there are."""


@triton.jit
def signs(
    p_words, o_row, o_t, m_t, DTYPE: tl.constexpr,
    WORDS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """±1 `[T, 8 * PADDED]` of words `[FIRST, FIRST + COUNT)`: the bit, inverted, is moved to a one's sign."""
    o_c = tl.arange(0, PADDED)
    m_w = m_t[:, None]
    if PADDED != COUNT:
        m_w = m_w & (o_c < COUNT)[None, :]
    b_words = tl.load(p_words + (o_row + o_t)[:, None] * WORDS + FIRST + o_c[None, :], mask=m_w, other=0)
    o_j = tl.arange(0, 8)[None, :, None]
    if tl.float32 == DTYPE:
        b_bits = ((b_words.to(tl.int32)[:, None, :] << (31 - o_j)) & -0x80000000) ^ -0x40800000
        b_signs = b_bits.to(tl.float32, bitcast=True)
    else:
        b_bits = ((b_words.to(tl.int16)[:, None, :] << (15 - o_j).to(tl.int16)) & -0x8000) ^ -0x4400
        b_signs = b_bits.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(b_signs, [o_t.shape[0], 8 * PADDED])


@triton.jit
def score(b_q, fields, tables, p_rope, i_h, o_row, o_t, m_t, META: tl.constexpr, PRECISION: tl.constexpr):
    b_s = tl.zeros([b_q[0].shape[0], o_t.shape[0]], tl.float32)
    b_sketch = b_s
    for i in tl.static_range(len(META)):
        b_signs = signs(
            fields[META[i][0]], o_row, o_t, m_t, b_q[i].dtype, META[i][1], META[i][2], META[i][3], META[i][4]
        )
        b_sketch = tl.dot(b_q[i], tl.trans(b_signs), b_sketch, input_precision=PRECISION)
        if META[i][5]:
            b_scale = tl.load(fields[META[i][0] + 1] + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)
            b_s += b_sketch * b_scale[None, :]
            b_sketch = tl.zeros_like(b_s)
    return b_s


def qjl_side(codec: QJLCodec) -> KernelSide:
    """Operands of a prepared QJL codec."""
    meta, widths, parts = [], [], []
    basis = codec.constants()["basis"]
    for index, part in enumerate(codec.instances):
        words = words_per_token(part.rows)
        rows = basis[:, part.span].unflatten(1, (CODES_PER_WORD, words))
        for first in range(0, words, CHUNK_WORDS):
            count = min(CHUNK_WORDS, words - first)
            padded = max(2, triton.next_power_of_2(count))
            meta.append((2 * index, words, first, count, padded, first + count == words))
            chunk = rows.new_zeros(len(rows), CODES_PER_WORD, padded, rows.shape[-1])
            chunk[:, :, :count] = rows[:, :, first : first + count]
            parts.append(chunk.flatten(1, 2))
            widths.append(CODES_PER_WORD * padded)
    query_map = with_mean(torch.cat(parts, 1).mT, codec.mean)
    return KernelSide(
        score, None, tuple(meta), tuple(widths), query_map=query_map.contiguous(), bias=codec.mean is not None
    )
