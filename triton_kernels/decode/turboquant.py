"""TurboQuant's device functions, also used by every codec that is a sum of scalar-quantized components, such as QJL.

With components i along rows A_i of the basis, scales c_i[t], levels L_i (TurboQuant, Algorithms 1 and 2; section 4.3;
QJL, Definition 3.1, where the rows are those of a sketch and the levels ±1):

    score:       s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩
    accumulate:  acc_i += (p[t] c_i[t]) L_i[codes_i[t]],      output = Σ_i A_iᵀ acc_i
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import CODES_PER_WORD, PLANES, padded_words
from kvcache_compress.codecs.quantizers.scalar import Component
from kvcache_compress.triton_kernels.common import assembly, in_place, lookup
from kvcache_compress.triton_kernels.common.codes import Codes, codes_of, in_halves, load_codes, load_scales, planes
from kvcache_compress.triton_kernels.common.operands import KernelSide, code_tiles, in_code_order, with_mean


class Part(NamedTuple):
    """Constants of a component, or of a run of its words: the codes, and their first tile of code space.

    even: True if levels are uniform; trellis: True for trellis codes; table: start of their table in the words, or -1
    if `lookup.py` cannot unpack them; placed: True if codes stay in place (`in_place.placed`), where a further constant
    tile subtracts the middle code; last: True for a component's last run.
    """

    codes: Codes
    tile: int
    even: bool
    trellis: bool
    table: int
    placed: bool
    last: bool


class Components(NamedTuple):
    """Parts of all components: the oldest supported Triton takes no tuple of tuples that is not a member."""

    parts: tuple[Part, ...]


@triton.jit
def component_levels(
    tile, META: tl.constexpr, AT: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr, VALUES: tl.constexpr
):
    """Tiles of the levels of part `AT` (see `codes.py`), and the component's scale per token.

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
    if PART.placed and PART.last:
        # It multiplies the rows that `in_place.in_place` adds for the middle code.
        b_middle = tl.full([tile.o_t.shape[0], 16], 2.0**BITS * (in_place.UNIT if FAST else 1.0), DTYPE)
        b_levels = b_levels + (b_middle,)
    return b_levels, b_scale


@triton.jit
def score(b_q, tile, META: tl.constexpr, FAST: tl.constexpr):
    """s[t] = Σ_i c_i[t] ⟨A_i q, L_i[codes_i[t]]⟩"""
    b_s = tl.zeros([tile.o_t.shape[0], b_q[0].shape[1]], tl.float32)
    b_part = b_s
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
            for j in tl.static_range(len(b_levels)):
                b_part = tl.dot(b_levels[j], b_q[META.parts[i].tile + j], b_part, input_precision="ieee")
            if META.parts[i].last:
                b_s += b_part * b_scale[:, None]
                b_part = tl.zeros_like(b_s)
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
    side: Side, components: Sequence[Component], basis: torch.Tensor, mean: torch.Tensor | None, most_words: int = 0
) -> KernelSide:
    """Kernel operands of components along `basis` `[H or 1, W, D]`, and the keys' `mean` `[H, D]`, if any.

    most_words: words of a token's one-bit codes that are unpacked at a time, by default all.
    """
    keys = side == "keys"
    parts, words, tiles, rows, fours = [], [], [], [], []
    field, places, widest = 0, 0, []
    widths = tuple(component.width for component in components)
    for component, part in zip(components, basis.split(widths, 1), strict=True):
        bits, levels, even, trellis = component.bits, component.levels, component.even, component.trellis
        runs = _runs(codes_of(bits, component.width, field), most_words or component.width)
        unit, table = 1.0, -1
        needed = {lookup.places_needed(_width(run), bits, trellis) for run in runs}
        fits = len(needed) == 1 and all(lookup.fits(_width(run), bits, trellis) for run in runs)
        if fits and (needed <= {0, places} or not places):
            table = sum(map(len, words))
            places = max(needed) or places
        placed = even and table >= 0 and bits in (1, 2, 4)
        if even:
            unit = float(levels[1] - levels[0]) / (1 if placed else lookup.unit(bits))
        if table >= 0 and not placed and (bits == 3 or not even):
            if trellis:
                words.append(lookup.trellis_table(levels, bits))
            else:
                words.append(assembly.byte_table(levels / unit, bits))
        middle = []
        for run in runs:
            parts.append(Part(run, len(tiles), even, trellis, table, placed, run is runs[-1]))
            halved = in_halves(bits, run.padded, trellis)
            joined = 8 if halved and run.padded == 16 else run.padded
            fours += [table >= 0 and assembly.in_fours(joined) for _ in code_tiles(_width(run))]
            tiles += code_tiles(_width(run))
            widest.append(assembly.warps(_width(run)))
            own = part.unflatten(1, (CODES_PER_WORD, run.words))[:, :, run.first : run.first + run.count].flatten(1, 2)
            own = unit * in_code_order(own, (_width(run),))
            if halved:
                own = own.unflatten(1, (8, run.padded // 2, 2)).transpose(2, 3).flatten(1, 3)
            if placed:
                own, share = in_place.in_place(own, bits, keys).tensor_split([own.shape[1]], 1)
                middle.append(share)
            rows.append(own)
        if placed:
            tiles.append(16)
            fours.append(False)
            rows.append(torch.stack(middle).sum(0))
            if not keys:
                rows[-2:] = (row / in_place.UNIT.value for row in rows[-2:])
        field += len(PLANES[bits]) + 1
    if places:
        words.append(assembly.places(places).to(basis.device))
    basis = torch.cat(rows, 1)
    few = len(components) <= 2
    return KernelSide(
        score if keys else accumulate,
        Components(tuple(parts)),
        tuple(tiles),
        tables=tuple(component.levels for component in components),
        words=torch.cat(words) if words else None,
        places=places,
        tokens=16 if not few else 64 if sum(tiles) <= 80 or (len(parts) == 1 and placed) else 32,
        warps=max(1 if few else sum(widths) // 256, *widest),
        matrix=with_mean(basis.mT, mean) if keys else basis.contiguous(),
        headroom=in_place.HEADROOM,
        fours=tuple(fours) if keys else (),
    )


def _runs(codes: Codes, most: int) -> list[Codes]:
    """The words of a token in runs of at most `most`."""
    counts = [min(most, codes.words - first) for first in range(0, codes.words, most)]
    return [
        codes._replace(first=most * i, count=count, padded=padded_words(CODES_PER_WORD * count))
        for i, count in enumerate(counts)
    ]


def _width(run: Codes) -> int:
    return CODES_PER_WORD * run.count
