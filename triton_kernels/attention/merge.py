"""Merge the splits of `attend_kernel` by log-sum-exp, map the packed sum out of code space, and add the dense sums.

out = (Σ_s 2^(m_s - m) acc_s) A + Σ_d 2^(m_d - m) acc_d,  divided by  Σ_s 2^(m_s - m) l_s + Σ_d 2^(m_d - m) l_d
"""

import triton
import triton.language as tl

from .kernel import DENSE, LOG2E, padded

MERGED = tl.constexpr(128)
"""Splits and programs of dense segments that a merge is padded to, so that it is compiled once."""


@triton.jit(do_not_specialize=("splits",))
def merge_kernel(
    p_acc, p_dense, p_stats, p_map, p_s_aux, p_out, splits, s_map, H, G, N,
    W: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_S_AUX: tl.constexpr,
):  # fmt: skip
    """Merge one query row: weigh the splits, map the packed sum out of code space, add the dense part, normalise.

    `p_s_aux` are learned logits that join the denominator.
    """
    i_r, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = G * N
    i_h = i_bh % H
    o_s, o_v = tl.arange(0, MERGED), tl.arange(0, padded(DV))
    m_s, m_v = o_s < splits + DENSE, o_v < DV
    p_stats += (i_bh * (splits + DENSE) * rows + i_r) * 2
    b_m = tl.load(p_stats + o_s * rows * 2, mask=m_s, other=float("-inf"))
    b_l = tl.load(p_stats + o_s * rows * 2 + 1, mask=m_s, other=0.0)
    o_d = tl.arange(0, DENSE)
    b_dense_m = tl.load(p_stats + (splits + o_d) * rows * 2)
    p_dense += (i_bh * DENSE * rows + i_r) * DV
    b_dense = tl.load(p_dense + o_d[:, None] * (rows * DV) + o_v[None, :], mask=m_v[None, :], other=0.0)
    b_top = tl.max(b_m, 0)
    if HAS_S_AUX:
        b_s_aux = tl.load(p_s_aux + i_h * G + i_r // N).to(tl.float32) * LOG2E
        b_top = tl.maximum(b_top, b_s_aux)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_weight = tl.exp2(b_m - b_top)
    b_total = tl.sum(b_weight * b_l, 0)
    if HAS_S_AUX:
        b_total += tl.exp2(b_s_aux - b_top)
    b_out = tl.sum(b_dense * tl.exp2(b_dense_m - b_top)[:, None], 0)
    p_acc += (i_bh * splits * rows + i_r) * W
    if HAS_MAP:
        for start in range(0, W, CHUNK):
            o_w = start + tl.arange(0, CHUNK)
            m_w = o_w < W
            m_a = (o_s < splits)[:, None] & m_w[None, :]
            b_acc = tl.load(p_acc + o_s[:, None] * (rows * W) + o_w[None, :], mask=m_a, other=0.0)
            b_sum = tl.sum(b_acc * b_weight[:, None], 0)
            m_o = m_w[:, None] & m_v[None, :]
            b_map = tl.load(p_map + i_h * s_map + o_w[:, None] * DV + o_v[None, :], mask=m_o, other=0.0)
            b_out += tl.sum(b_map * b_sum[:, None], 0)
    else:
        # In chunks too: all splits at once would spill registers.
        for start in range(0, splits, CHUNK):
            o_c = start + tl.arange(0, CHUNK)
            m_c = o_c < splits
            b_share = tl.exp2(tl.load(p_stats + o_c * rows * 2, mask=m_c, other=float("-inf")) - b_top)
            m_a = m_c[:, None] & m_v[None, :]
            b_acc = tl.load(p_acc + o_c[:, None] * (rows * W) + o_v[None, :], mask=m_a, other=0.0)
            b_out += tl.sum(b_acc * b_share[:, None], 0)
    b_out = b_out / tl.where(b_total > 0, b_total, 1.0)
    i_b = i_bh // H
    o_out = ((i_b * N + i_r % N) * (H * G) + i_h * G + i_r // N) * DV
    tl.store(p_out + o_out + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)
