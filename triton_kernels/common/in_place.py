"""Read codes of uniform levels as numbers in place, without a lookup.

With a 16-bit word's other bits masked off, a code is a subnormal float16, `code · 2^(place - 24)`. Query and output
maps absorb the places and the middle code (`in_place`).
"""

import torch
import triton
import triton.language as tl

from .assembly import assembled, block, joined, load_bytes, load_halves
from .codes import load_codes, load_columns, load_words, low_plane, tile_width

UNIT = tl.constexpr(2.0**-24)
"""Value of the lowest bit of a float16 number, the smallest above zero."""
HEADROOM = 2.0**8
"""Largest mapped query where codes stay in place: queries of different fields differ by up to 256."""


@triton.constexpr_function
def place(field, bits):
    """Bit of a float16 number's mantissa, which has ten, at which `placed` leaves the code of a field."""
    return bits * (field % (10 // bits))


def _placed(bits: int) -> list[str]:
    """Mask codes where they lie: subnormal float16 numbers, `code · 2^(place - 24)`."""
    lines, fields = [], list(range(8))
    if bits == 1:
        lines = [
            "lop3.b32 r0, $10, $11, 0x0f0f, 0xe4",
            "prmt.b32 r0, $8, $9, r0",  # bytes A B A B
            "prmt.b32 r0, r0, 0, 0x1100",
        ]
        runs = {"r0": fields}
    elif bits == 2:
        lines = ["shr.u32 r0, $8, 10"]
        runs = {"$8": fields[:5], "r0": fields[5:]}
    else:
        lines = [
            "prmt.b32 r0, $8, $9, 0x5410",  # halves of A and B
            "prmt.b32 r1, $8, $9, 0x7632",
            "shr.u32 r2, r0, 8",
            "shr.u32 r3, r1, 8",
        ]
        runs = {"r0": fields[:2], "r2": fields[2:4], "r1": fields[4:6], "r3": fields[6:]}
    for register, run in runs.items():
        for field in run:
            mask = (2**bits - 1) * 0x10001 << bits * (field % (10 // bits))
            lines.append(f"and.b32 ${field}, {register}, {mask:#x}")
    return lines


PLACED_ONE, PLACED_TWO, PLACED_FOUR = (block(8, inputs, *_placed(bits)) for bits, inputs in ((1, 4), (2, 1), (4, 2)))


@triton.jit
def placed(tile, CODES: tl.constexpr, VALUES: tl.constexpr, FOURS: tl.constexpr = False):
    """Tiles of codes of one, two or four bits as numbers in place, `code · 2^(place - 24)`; see `lookup.levels`.

    This costs one instruction per two codes, and at most one to put the next fields in place.
    """
    BITS: tl.constexpr = CODES.bits
    PADDED: tl.constexpr = CODES.padded
    COLUMNS: tl.constexpr = VALUES and PADDED >= 16 and CODES.words == PADDED and BITS > 1
    p_words, words = low_plane(tile, CODES), tile.words
    if BITS == 1:
        b_words = load_bytes(p_words, tile, CODES.words, PADDED, CODES.count)
    elif COLUMNS:
        b_words = load_columns(p_words, tile, CODES.words)
    elif BITS == 2 and PADDED < 16:
        b_words = load_halves(p_words, words[len(words) - 1], tile, CODES.words, PADDED, CODES.count)
    else:
        b_words = load_words(p_words, tile, CODES.words, PADDED, CODES.count)
    if BITS == 1:
        b_codes = assembled(PLACED_ONE, (b_words, words[len(words) - 1]))
    else:
        b_codes = assembled(PLACED_TWO if BITS == 2 else PLACED_FOUR, (b_words,))
    if COLUMNS:
        b_codes = [tl.trans(b_tile) for b_tile in b_codes]
    if PADDED < 16:
        b_codes = joined(b_codes, FOURS)
    return b_codes


@triton.jit
def placed_codes(tile, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Tiles of `placed` as multiples of `UNIT`: the portable path."""
    BITS: tl.constexpr = CODES.bits
    WIDTH: tl.constexpr = tile_width(CODES.padded)
    b_codes = load_codes(tile, CODES)
    b_tiles = ()
    for i in tl.static_range(len(b_codes)):
        o_field = i * (WIDTH // CODES.padded) + tl.arange(0, WIDTH) // CODES.padded
        b_tiles = b_tiles + ((b_codes[i] << (BITS * (o_field % (10 // BITS)))[None, :]).to(DTYPE),)
    return b_tiles


def places_undone(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of a map `[H, W, D]`, in code order, each divided by `2 ** place` of its code."""
    field = torch.arange(rows.shape[1], device=rows.device) * 8 // rows.shape[1]
    return rows * 2.0 ** -place(field, bits)[:, None]


def in_place(rows: torch.Tensor, bits: int, keys: bool) -> torch.Tensor:
    """Rows of a map `[H, W, D]` for codes in place, and 16 more for the middle code: `[H, W + 16, D]`.

    Rows are in code order, for levels a distance of 1 apart. The middle code of keys is split into unequal shares, so
    that they are not all rounded alike.
    """
    shares = torch.arange(1.0, 17.0, device=rows.device) / 136 if keys else torch.eye(16, device=rows.device)[0]
    middle = -(2**bits - 1) / 2 * 2.0**-bits * rows.sum(1, keepdim=True) * shares[:, None]
    return torch.cat([places_undone(rows, bits), middle], 1)
