"""TurboQuant's device functions, also used by every codec that is a sum of scalar-quantized components.

With components i along rows A_i of the basis, scales c_i[t], levels L_i (TurboQuant, Algorithms 1 and 2; section 4.3):

    score:       s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩
    accumulate:  acc_i += (p[t] c_i[t]) L_i[codes_i[t]],      output = Σ_i A_iᵀ acc_i
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.quantizers.scalar import Component
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, in_halves, load_codes, load_scales, planes
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order, with_mean


class Part(NamedTuple):
    """Constants of a component: its codes, and its first tile of code space.

    even: True if levels are uniform; trellis: True for trellis codes; table: start of their table in the words, or -1
    if `lookup.py` cannot unpack them; placed: True if codes stay in place (`in_place.placed`), where a further constant
    tile subtracts the middle code.
    """

    codes: Codes
    tile: int
    even: bool
    trellis: bool
    table: int
    placed: bool


class Components(NamedTuple):
    """All components: the oldest supported Triton takes no tuple of tuples that is not a member."""

    parts: tuple[Part, ...]


@triton.jit
def component_levels(
    tile, META: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr
):
    """Tiles of the levels of component `AT` (see `codes.py`), and the scale per token.

    In the fast path, codes in place are multiplied by `in_place.UNIT`.
    """
    PART: tl.constexpr = META.parts[AT]
    CODES: tl.constexpr = PART.codes
    BITS: tl.constexpr = CODES.bits
    b_scale = load_scales(tile.fields[CODES.field + planes(BITS)], tile)
    if FAST and PART.placed:
        b_levels = in_place.placed(tile, CODES, VALUES, not VALUES)
    elif FAST and PART.table >= 0 and PART.trellis:
        b_levels = lookup.trellis_levels(tile, CODES, PART.table, not VALUES)
    elif FAST and PART.table >= 0:
        b_levels = lookup.levels(tile, tile.words, CODES, PART.table, PART.even, VALUES, not VALUES)
    elif PART.placed:
        b_levels = in_place.placed_codes(tile, CODES, DTYPE)
    else:
        b_levels = ()
        b_codes = load_codes(tile, CODES, PART.trellis)
        for i in tl.static_range(len(b_codes)):
            if PART.even:
                b_tile = (b_codes[i].to(DTYPE) - (2**BITS - 1) / 2) * lookup.unit(BITS)
            else:
                b_tile = tl.load(tile.tables[AT] + b_codes[i])
            b_levels = b_levels + (b_tile.to(DTYPE),)
    if PART.placed:
        b_levels = b_levels + (in_place.middle_tile(tile.o_t.shape[0], BITS, DTYPE, FAST),)
    return b_levels, b_scale


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩"""
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    for i in tl.static_range(len(META.parts)):
        b_levels, b_scale = component_levels(tile, META, i, b_q[0].dtype, FAST, False)
        b_scale = b_scale.to(tl.float32)
        if META.parts[i].placed and FAST:
            b_scale *= 1 / in_place.UNIT
        if b_q[0].dtype == tl.float32:
            # Chained: independent sums would load the operands of all components at once and spill registers.
            for j in tl.static_range(len(b_levels)):
                b_tile = b_levels[j] * b_scale[:, None]
                b_s = tl.dot(b_tile, b_q[META.parts[i].tile + j], b_s, input_precision="ieee")
        else:
            b_part = tl.zeros_like(b_s)
            for j in tl.static_range(len(b_levels)):
                b_part = tl.dot(b_levels[j], b_q[META.parts[i].tile + j], b_part, input_precision="ieee")
            b_s += b_part * b_scale[:, None]
    return b_s


@triton.jit
def accumulate(b_p, tile, b_acc, META: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """acc_i += (p[t] c_i[t]) L_i[codes_i[t]]"""
    b_sums = ()
    for i in tl.static_range(len(META.parts)):
        b_levels, b_scale = component_levels(tile, META, i, DTYPE, FAST, True)
        if FAST:
            b_weights = assembly.product(b_p.to(DTYPE), b_scale[:, None])
        else:
            b_weights = (b_p * b_scale.to(tl.float32)[:, None]).to(DTYPE)
        for j in tl.static_range(len(b_levels)):
            b_tile = tl.trans(b_levels[j])
            b_sum = b_acc[META.parts[i].tile + j]
            if META.parts[i].placed and not FAST:
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
    parts, words, tiles, rows, fours = [], [], [], [], []
    field, places = 0, 0
    widths = tuple(component.width for component in components)
    for component, part in zip(components, basis.split(widths, 1), strict=True):
        width, bits, levels = component.width, component.bits, component.levels
        even, trellis, codes = component.even, component.trellis, codes_of(bits, width, field)
        unit, table = 1.0, -1
        needed = lookup.places_needed(width, bits, trellis)
        if lookup.fits(width, bits, trellis) and (needed in (0, places) or not places):
            table = sum(map(len, words))
            places = needed or places
        placed = even and table >= 0 and bits in (1, 2, 4)
        if even:
            unit = float(levels[1] - levels[0]) / (1 if placed else lookup.unit(bits))
        if table >= 0 and not placed and (bits == 3 or not even):
            if trellis:
                words.append(lookup.trellis_table(levels, bits, codes.padded))
            else:
                words.append(assembly.byte_table(levels / unit, bits))
        parts.append(Part(codes, len(tiles), even, trellis, table, placed))
        halves = codes.padded // 2 if in_halves(bits, codes.padded, trellis) else codes.padded
        fours += [table >= 0 and assembly.in_fours(halves) for _ in code_tiles(width)]
        tiles += code_tiles(width)
        part = unit * in_code_order(part, (width,))
        if in_halves(bits, codes.padded, trellis):
            part = part.unflatten(1, (8, codes.padded // 2, 2)).transpose(2, 3).flatten(1, 3)
        if placed:
            tiles.append(16)
            fours.append(False)
            part = in_place.in_place(part, bits, keys)
            if not keys:
                part = part / in_place.UNIT.value
        rows.append(part)
        field += len(PLANES[bits]) + 1
    if places:
        words.append(assembly.places(places).to(basis.device))
    basis = torch.cat(rows, 1)
    few = len(parts) <= 2
    return KernelSide(
        score if keys else accumulate,
        Components(tuple(parts)),
        tuple(tiles),
        tables=tuple(component.levels for component in components),
        words=torch.cat(words) if words else None,
        places=places,
        tokens=16 if not few else 64 if sum(tiles) <= 80 or (len(parts) == 1 and placed) else 32,
        warps=max(1 if few else sum(widths) // 256, *map(assembly.warps, widths)),
        matrix=with_mean(basis.mT, mean) if keys else basis.contiguous(),
        headroom=in_place.HEADROOM,
        fours=tuple(fours) if keys else (),
    )
