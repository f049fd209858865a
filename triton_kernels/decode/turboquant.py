"""TurboQuant's device functions, also used by every codec that is a sum of scalar-quantized components.

With components i along rows A_i of the basis, scales c_i[t], levels L_i (TurboQuant, Algorithms 1 and 2; section 4.3):

    score:       s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩
    accumulate:  acc_i += (p[t] c_i[t]) L_i[codes_i[t]],      output = Σ_i A_iᵀ acc_i
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import PLANES, padded_words, words_per_token
from kvcache_compress.codecs.quantizers.scalar import Component
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.common.codes import in_halves, load_codes, load_scales
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order, with_mean
from kvcache_compress.triton_kernels.decode import trellis_codes


class Components(NamedTuple):
    """Constants of the components: bits of a code, words of a token, padded words (`codes.py`), first field.

    even: True if levels are uniform; trellis: True for trellis codes; first: start of their table in the words, or -1
    if `lookup.py` cannot unpack them; tile: the component's first tile; placed: True if codes stay in place
    (`in_place.placed`), where a further constant tile subtracts the middle code.
    """

    bits: tuple[int, ...]
    words: tuple[int, ...]
    padded: tuple[int, ...]
    field: tuple[int, ...]
    even: tuple[bool, ...]
    trellis: tuple[bool, ...]
    first: tuple[int, ...]
    tile: tuple[int, ...]
    placed: tuple[bool, ...]


@triton.jit
def component_levels(
    fields, tables, words, o_row, o_t, m_t,
    META: tl.constexpr, PART: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Tiles of a component's levels (see `codes.py`), and the scale per token.

    In the fast path, codes in place are multiplied by `in_place.UNIT`.
    """
    BITS: tl.constexpr = META.bits[PART]
    WORDS: tl.constexpr = META.words[PART]
    PADDED: tl.constexpr = META.padded[PART]
    AT: tl.constexpr = META.field[PART]
    EVEN: tl.constexpr = META.even[PART]
    TRELLIS: tl.constexpr = META.trellis[PART]
    FIRST: tl.constexpr = META.first[PART]
    PLACED: tl.constexpr = META.placed[PART]
    SCALE: tl.constexpr = AT + (1 if (BITS == 1 or BITS == 2 or BITS == 4) else 2)
    b_scale = load_scales(fields[SCALE], o_row, o_t, m_t)
    if FAST and PLACED:
        b_levels = in_place.placed(fields[AT], words, o_row, o_t, m_t, BITS, WORDS, PADDED, WORDS, VALUES)
    elif FAST and FIRST >= 0 and TRELLIS:
        b_levels = trellis_codes.trellis_levels(
            fields[AT], fields[SCALE - 1], words, o_row, o_t, m_t, FIRST, BITS, WORDS, PADDED
        )
    elif FAST and FIRST >= 0:
        b_levels = lookup.levels(
            fields[AT], fields[SCALE - 1], words, o_row, o_t, m_t, FIRST, BITS, EVEN, WORDS, PADDED, WORDS, VALUES
        )
    else:
        b_levels = ()
        b_codes = load_codes(fields[AT], fields[SCALE - 1], o_row, o_t, m_t, BITS, WORDS, PADDED, WORDS, TRELLIS)
        if PLACED:
            b_levels = in_place.placed_codes(b_codes, PADDED, BITS, DTYPE)
        else:
            for i in tl.static_range(len(b_codes)):
                if EVEN:
                    b_tile = (b_codes[i].to(DTYPE) - (2**BITS - 1) / 2) * lookup.unit(BITS)
                else:
                    b_tile = tl.load(tables[PART] + b_codes[i])
                b_levels = b_levels + (b_tile.to(DTYPE),)
    if PLACED:
        b_levels = b_levels + (in_place.middle_tile(o_t.shape[0], BITS, DTYPE, FAST),)
    return b_levels, b_scale


@triton.jit
def score(
    b_q, fields, tables, words, p_rope, i_h, s_head, o_row, o_t, m_t,
    META: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩"""
    b_s = tl.zeros([o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(META.bits)):
        b_levels, b_scale = component_levels(fields, tables, words, o_row, o_t, m_t, META, i, b_q[0].dtype, FAST, False)
        b_scale = b_scale.to(tl.float32)
        if META.placed[i] and FAST:
            b_scale *= 1 / in_place.UNIT
        if b_q[0].dtype == tl.float32:
            # Chained: independent sums would load the operands of all components at once and spill registers.
            for j in tl.static_range(len(b_levels)):
                b_tile = b_levels[j] * b_scale[:, None]
                b_s = tl.dot(b_tile, b_q[META.tile[i] + j], b_s, input_precision="ieee")
        else:
            b_part = tl.zeros_like(b_s)
            for j in tl.static_range(len(b_levels)):
                b_part = tl.dot(b_levels[j], b_q[META.tile[i] + j], b_part, input_precision="ieee")
            b_s += b_part * b_scale[:, None]
    return b_s


@triton.jit
def accumulate(
    b_p, fields, tables, words, i_h, s_head, o_row, o_t, m_t, b_acc,
    META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """acc_i += (p[t] c_i[t]) L_i[codes_i[t]]"""
    b_sums = ()
    for i in tl.static_range(len(META.bits)):
        b_levels, b_scale = component_levels(fields, tables, words, o_row, o_t, m_t, META, i, DTYPE, FAST, True)
        if FAST:
            b_weights = assembly.product(b_p.to(DTYPE), b_scale[:, None])
        else:
            b_weights = (b_p * b_scale.to(tl.float32)[:, None]).to(DTYPE)
        for j in tl.static_range(len(b_levels)):
            b_tile = tl.trans(b_levels[j])
            b_sum = b_acc[META.tile[i] + j]
            if META.placed[i] and not FAST:
                b_sum += in_place.UNIT * tl.dot(b_tile, b_weights, input_precision="ieee")
            else:
                b_sum = tl.dot(b_tile, b_weights, b_sum, input_precision="ieee")
            b_sums = b_sums + (b_sum,)
    return b_sums


def turboquant_side(
    side: Side, components: Sequence[Component], basis: torch.Tensor, mean: torch.Tensor | None
) -> KernelSide:
    """Kernel operands of components along `basis` `[H or 1, W, D]`, and the keys' `mean` `[H, D]`, if any."""
    keys = side == "keys"
    meta, words, tiles, rows = [], [], [], []
    at, places = 0, 0
    widths = tuple(component.width for component in components)
    for component, part in zip(components, basis.split(widths, 1), strict=True):
        width, bits, levels = component.width, component.bits, component.levels
        even, trellis, padded = component.even, component.trellis, padded_words(width)
        unit, first = 1.0, -1
        needed = lookup.places_needed(width, bits, trellis)
        if lookup.fits(width, bits, trellis) and (needed in (0, places) or not places):
            first = sum(map(len, words))
            places = needed or places
        placed = even and first >= 0 and bits in (1, 2, 4)
        if even:
            unit = float(levels[1] - levels[0]) / (1 if placed else lookup.unit(bits))
        if first >= 0 and not placed and (bits == 3 or not even):
            table = (
                trellis_codes.trellis_table(levels, bits, padded)
                if trellis
                else assembly.byte_table(levels / unit, bits)
            )
            words.append(table)
        meta.append((bits, words_per_token(width), padded, at, even, trellis, first, len(tiles), placed))
        tiles += code_tiles(width)
        part = unit * in_code_order(part, (width,))
        if in_halves(bits, padded, trellis):
            part = part.unflatten(1, (8, padded // 2, 2)).transpose(2, 3).flatten(1, 3)
        if placed:
            tiles.append(16)
            part = in_place.in_place(part, bits, keys)
            if not keys:
                part = part / in_place.UNIT.value
        rows.append(part)
        at += len(PLANES[bits]) + 1
    if places:
        words.append(assembly.places(places).to(basis.device))
    basis = torch.cat(rows, 1)
    return KernelSide(
        score if keys else accumulate,
        Components(*zip(*meta, strict=True)),
        tuple(tiles),
        tables=tuple(component.levels for component in components),
        words=torch.cat(words) if words else None,
        places=places,
        tokens=16 if len(meta) > 2 else 64 if sum(tiles) <= 80 or (len(meta) == 1 and placed) else 32,
        warps=max(sum(widths) // 256 if len(meta) > 2 else 1, *map(assembly.warps, widths)),
        matrix=with_mean(basis.mT, mean) if keys else basis.contiguous(),
        headroom=in_place.HEADROOM,
    )
