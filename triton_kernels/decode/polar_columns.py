"""Undo recursive PolarQuant's tree over 128 channels in registers, by shuffles that look up cos and sin.

A tile `[T, 8]` holds eight neighbouring coordinates of code space, or radii of a level, one per column. In levels 1 to
4 the paired halves are whole tiles, so everything below a radius of level 4 lies in its column: 2 radii of level 3, 4
of level 2, 8 of level 1 and 16 numbers. No number changes its thread.

Lane i of a warp holds entry i of a level's table in one register, cos and sin in half precision. `shfl.idx` reads the
register of the lane that a code names and ignores the bits above the code, so a lookup takes a shift and a shuffle for
any angles. The radius times the entry gives both halves below it. Levels 4 to 7, 8 bits per column, are looked up in
memory at once.
"""

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.device import on_cpu
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook, PolarTree
from kvcache_compress.triton_kernels.common import assembly
from kvcache_compress.triton_kernels.common.codes import load_words

WHOLE = ((4, 3, 2, 2, 2, 2, 2), (4, 2, 2, 2, 2, 2, 2))
HALVES = ".reg .b16 h0, h1"


def _level(outputs: list[str], bits: int, table: str, codes: str, step: int, radii: list[str]) -> list[str]:
    """Instructions for the pairs below `radii`, registers of two; all low halves come first."""
    lines = []
    for i, output in enumerate(outputs):
        selected = codes if i == 0 else "r14"
        lines += [f"shr.u32 r14, {codes}, {step * i}"] if i else []
        radius, half = radii[i % len(radii)], "h0" if i < len(radii) else "h1"
        lines += [
            # Every 2 ** bits lanes read each other's entries of the table.
            f"shfl.sync.idx.b32 r14, {table}, {selected}, {(32 - 2**bits) << 8 | 31:#x}, 0xffffffff",
            f"mov.b32 {{h0, h1}}, {radius}",
            f"mov.b32 r15, {{{half}, {half}}}",
            f"mul.rn.f16x2 {output}, r14, r15",
        ]
    return lines


def _three_levels(bits: int) -> list[str]:
    """Assembly for the eight pairs of coordinates below two radii of level 3; `bits` are level 2's.

    Operands: pairs of radii, words of level 3, 2 (the high plane of 3 bits after it) and 1, tables of level 1, 2 and 3.
    """
    inputs = 12 if bits == 3 else 11
    first, *tables = (f"${i}" for i in range(inputs, inputs + 4))
    second, lines = "$10", []
    if bits == 3:
        second = "r0"
        lines = [
            "shl.b32 r1, $11, 4",
            "lop3.b32 r1, $11, r1, 0x000000ff, 0xe4",  # bits 0, 2, 4, 6 to 0, 2, 8, 10
            "shl.b32 r2, r1, 2",
            "shl.b32 r1, r1, 4",
            "lop3.b32 r1, r2, r1, 0x04040404, 0xe4",  # and to 2, 6, 10, 14
            "lop3.b32 r0, $10, r1, 0x33333333, 0xe4",
        ]
    lines += _level(["r3", "r4"], 2, tables[2], "$9", 8, ["$8"])
    lines += _level(["r5", "r6", "r7", "r8"], bits, tables[1], second, 4, ["r3", "r4"])
    lines += _level([f"${i}" for i in range(8)], 4, tables[0], first, 4, ["r5", "r6", "r7", "r8"])
    return [HALVES, *lines]


def _lanes(bits: int) -> list[str]:
    """Assembly that puts entry i of 2 ** bits operands into lane i, repeating over the warp."""
    lines, entries = ["mov.u32 r14, %laneid"], [f"${1 + i}" for i in range(2**bits)]
    for bit in range(bits):
        lines += [f"and.b32 r15, r14, {1 << bit}", "setp.ne.u32 p0, r15, 0"]
        chosen = [f"r{i}" for i in range(len(entries) // 2)]
        lines += [
            f"selp.b32 {to}, {high}, {low}, p0"
            for to, low, high in zip(chosen, entries[::2], entries[1::2], strict=True)
        ]
        entries = chosen
    return [".reg .pred p0", *lines, "mov.b32 $0, r0"]


BELOW_TWO, BELOW_THREE = (assembly.block(8, 5 + bits, *_three_levels(bits)) for bits in (2, 3))
LANES_TWO, LANES_THREE, LANES_FOUR = (assembly.block(1, 2**bits, *_lanes(bits)) for bits in (2, 3, 4))


def fits(tree: PolarTree) -> bool:
    """True if `column_tiles` can undo this tree."""
    return tree.head_dim == 128 and tuple(level.bits for level in tree.levels) in WHOLE


@on_cpu()
def words(books: tuple[AngleCodebook, ...]) -> torch.Tensor:
    """`KernelSide.words` for `column_tiles`: tables of levels, then the shifts of their words in each column."""
    tables = [book.points.cpu().half().view(torch.int32).flatten() for book in books[:3]]
    column = torch.arange(8, dtype=torch.int32)
    half = 16 * (column % 2)
    shifts = (half + 2 * (column // 4), 8 * (column % 4) + column // 4, half + 2 * (column // 2), 2 * column)
    places = sum((shift << 8 * i for i, shift in enumerate(shifts)), torch.zeros_like(half))
    return torch.cat([*tables, places])


@on_cpu()
def coarse_table(books: tuple[AngleCodebook, ...]) -> torch.Tensor:
    """Radii of level 3, `[8, 256, 2]`, by column and `coarse_radii`'s index of the codes of levels 4 to 7."""
    table = torch.empty(8, 256, 2)
    codes = torch.arange(256)[:, None] >> torch.tensor([0, 2, 4, 6]) & 3
    for column in range(8):
        places = torch.tensor([2 * column, 16 + 2 * (column % 4), 24 + 2 * (column % 2), 28])
        factor = 4 | 1 << 8 - 2 * (column % 4) | 1 << 28 - 2 * column - 2 * (column % 2)
        index = ((codes << places).sum(-1) * factor & 0xFFFFFFFF) >> 24
        points = [book.points.cpu()[codes[:, i]] for i, book in enumerate(books[3:])]
        radius = points[1][:, column // 4] * points[2][:, column // 2 % 2] * points[3][:, column % 2]
        table[column, index] = radius[:, None] * points[0]
    return table


@on_cpu()
def tile_order(keys: bool) -> torch.Tensor:
    """Coordinate of code space in each column of the tiles, int64 `[128]`.

    In tiles of keys the halves of a pair are neighbours, as a register of the tensor cores' operands holds both; in
    tiles of values, where a register holds two tokens, they lie 8 columns apart.
    """
    tile, column, side = torch.arange(8)[:, None, None], torch.arange(8)[:, None], torch.arange(2)
    place = side * 64 + 8 * tile + column
    return place.flatten() if keys else place.mT.flatten()


@triton.jit
def lane_table(words, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Register in which lane i holds entry `i % 2 ** BITS` of a level's table; to Triton, a tile `[1, 1]`.

    Made of words that were loaded before the loop: the compiler moves no layout conversion past other tiles.
    """
    b_entries = ()
    for i in tl.static_range(2**BITS):
        b_entries = b_entries + (words[FIRST + i],)
    BLOCK: tl.constexpr = LANES_FOUR if BITS == 4 else LANES_THREE if BITS == 3 else LANES_TWO
    return tl.inline_asm_elementwise(BLOCK[0], BLOCK[1], b_entries, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def word_of_column(p_plane, tile, b_shift, LEVEL: tl.constexpr, COUNT: tl.constexpr):
    """A level's 16-bit words, `COUNT` per token, each at the low end of int32 `[T, 8]` in columns c % COUNT.

    They are read as 32-bit words, which the compiler can prefetch to shared memory.
    """
    HALF: tl.constexpr = COUNT // 2
    p_twos = p_plane.to(tl.pointer_type(tl.int32), bitcast=True) + LEVEL.offset // 2
    b_words = load_words(p_twos, tile, LEVEL.row // 2, HALF, HALF)
    b_words = tl.broadcast_to(b_words[:, None, :, None], [tile.o_t.shape[0], 8 // COUNT, HALF, 2])
    return tl.reshape(b_words, [tile.o_t.shape[0], 8]) >> b_shift


@triton.jit
def coarse_radii(p_coarse, p_rest, b_places, tile, LEVEL: tl.constexpr):
    """Pairs of radii of level 3 relative to the token's single radius, int32 `[T, 8]`; `LEVEL` is level 4."""
    p_twos = p_rest.to(tl.pointer_type(tl.int32), bitcast=True)
    b_rest = load_words(p_twos + LEVEL.offset // 2, tile, LEVEL.row // 2, 1, 1)
    b_column = b_places >> 24
    # The factor moves the masked codes of a column into the top 8 bits of the product, distinct for all codes.
    b_mask = (3 << b_column) | (3 << (16 + (b_column & 6))) | (3 << (24 + (b_column & 2))) | (3 << 28)
    b_factor = 4 | (1 << (8 - (b_column & 6))) | (1 << (28 - b_column - (b_column & 2)))
    b_codes = (((b_rest & b_mask) * b_factor).to(tl.uint32, bitcast=True) >> 24).to(tl.int32)
    # The column's table first: its address is the same in every iteration.
    p_column = p_coarse.to(tl.pointer_type(tl.int32), bitcast=True) + b_column * 128
    return tl.load(p_column + b_codes)


@triton.jit
def column_tiles(tile, META: tl.constexpr):
    """Decode to eight tiles `[T, 16]` of code space in `tile_order`; `META` is `polarquant_recursive.Tree`."""
    SECOND: tl.constexpr = META.levels[1]
    THIRD: tl.constexpr = META.levels[2]
    FOURTH: tl.constexpr = META.levels[3]
    BITS: tl.constexpr = SECOND.bits
    TWO: tl.constexpr = 16 + 2**BITS
    fields, words, p_coarse = tile.fields, tile.words, tile.tables[2 if META.coded else 1]
    b_places = words[len(words) - 1]
    p_twos = fields[THIRD.field]
    b_radii = coarse_radii(p_coarse, p_twos, b_places, tile, FOURTH)
    b_third = word_of_column(p_twos, tile, b_places >> 16 & 255, THIRD, 2)
    b_second = word_of_column(fields[SECOND.field], tile, b_places & 255, SECOND, 4)
    b_first = load_words(fields[0], tile, 8, 8, 8)
    b_codes = (b_radii, b_third, b_second)
    if BITS == 3:
        p_high = fields[SECOND.field + 1].to(tl.pointer_type(tl.int32), bitcast=True)
        b_codes = b_codes + (load_words(p_high, tile, 1, 1, 1) >> (b_places >> 8 & 255),)
    b_tables = (lane_table(words, 0, 4), lane_table(words, 16, BITS), lane_table(words, TWO, 2))
    BELOW: tl.constexpr = BELOW_THREE if BITS == 3 else BELOW_TWO
    b_inputs = b_codes + (b_first,) + b_tables
    b_pairs = tl.inline_asm_elementwise(BELOW[0], BELOW[1], b_inputs, dtype=(tl.int32,) * 8, is_pure=True, pack=1)
    b_tiles = ()
    for i in tl.static_range(8):
        b_low = b_pairs[i].to(tl.int16).to(tl.float16, bitcast=True)
        b_high = (b_pairs[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        b_tiles = b_tiles + (beside(b_low, b_high, META.keys),)
    return b_tiles


@triton.jit
def beside(b_low, b_high, KEYS: tl.constexpr):
    """Join both halves of pairs, each `[T, W]`, to a tile `[T, 2 W]` in `tile_order`."""
    b_both = tl.join(b_low, b_high)
    if not KEYS:
        b_both = tl.permute(b_both, [0, 2, 1])
    return tl.reshape(b_both, [b_low.shape[0], 2 * b_low.shape[1]])
