"""The recursive polar transform on packed codes: their layout, and the torch reference of the kernels.

A code-space vector y of D numbers is paired by halves. Level 1 pairs `y[i]` with `y[i + D / 2]`; level ℓ pairs the D /
2^(ℓ-1) radii of the level below in the same way. Undoing a level is then one concatenation `[r cos | r sin]`. The paper
pairs neighbours instead; the codec's basis contains the permutation between the two (`adjacent_order`).

Quantizing needs only comparisons. A point (x, y) lies beyond the boundary β if `y cos β > x sin β`. Deeper levels
compare squares of radii, so no angle and no square root is computed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import packing
from ..base import Fields
from ..device import on_cpu
from ..layout import CODES_PER_WORD, PLANES, Field, code_fields


@dataclass(frozen=True)
class AngleCodebook:
    """Angles of one level, ascending from the code nearest to angle 0, with tables to quantize and decode.

    Attributes:
        angles: float64 `[n]`.
        points: float32 `[n, 2]`, cos and sin of the angles rounded to 16 bits, so that kernels' 16-bit tables are
            exact.
        bounds: cos and sin of the boundary above each code, ascending from angle 0, float32 `[n, 2]`, on the circle. On
            deeper levels cos² and sin² of the boundaries between codes, `[n - 1, 2]`.
        lower: number of boundaries on the circle below π.
    """

    angles: torch.Tensor
    points: torch.Tensor
    bounds: torch.Tensor
    lower: int

    def to(self, device: torch.device) -> "AngleCodebook":
        return AngleCodebook(self.angles, self.points.to(device), self.bounds.to(device), self.lower)


class LevelCodes(NamedTuple):
    """Place of the `count` codes of one level in memory: code p is slot `base + p` of `words` words.

    Levels of a multiple of eight codes have words of their own; coarser levels of equal bits share words.

    Attributes:
        bits: bits per code.
        count: codes of the level per token.
        field: index of the low bit plane's field.
        row: words of that field per token.
        offset: first of the level's words in that row.
        words: number of these words.
        base: slot of the level's first code in these words.
        start: the level's first point in the joined tables of all levels.
    """

    bits: int
    count: int  # type: ignore[assignment]
    field: int
    row: int
    offset: int
    words: int
    base: int
    start: int

    @property
    def fills_words(self) -> bool:
        return self.count == CODES_PER_WORD * self.words


@dataclass(frozen=True)
class PolarTree:
    """Levels, finest first, of the transform of vectors of `head_dim` numbers; `roots` radii remain at the end."""

    head_dim: int
    roots: int
    levels: tuple[LevelCodes, ...]
    widths: tuple[tuple[int, int], ...]
    """(bits, codes per token with padding) of each code field."""

    @property
    def places(self) -> list[int]:
        """Location of each level's codes, for the C++ code: seven numbers per level, finest first."""
        numbers = ((x.bits, x.count, x.field, x.row, x.offset, x.words, x.base) for x in self.levels)
        return [number for level in numbers for number in level]

    def fields(self, radius: torch.dtype) -> tuple[Field, ...]:
        codes = [code_fields(bits, width, f"bits{bits}_") for bits, width in self.widths]
        return (*(field for planes in codes for field in planes), Field("radius", radius, (self.roots,)))


def polar_tree(head_dim: int, bits: tuple[int, ...]) -> PolarTree:
    """Build the tree of `len(bits)` levels; levels of equal bits share a field."""
    counts = [head_dim >> level for level in range(1, len(bits) + 1)]
    placed: dict[int, tuple[int, int, int, int]] = {}
    widths, field = [], 0
    for width in sorted(set(bits), reverse=True):
        members = [index for index, level_bits in enumerate(bits) if level_bits == width]
        words = 0
        for index in members:
            if counts[index] % CODES_PER_WORD == 0:
                placed[index] = (field, words, counts[index] // CODES_PER_WORD, 0)
                words += counts[index] // CODES_PER_WORD
        coarse = [index for index in members if index not in placed]
        shared = -(-sum(counts[index] for index in coarse) // CODES_PER_WORD)
        base = 0
        for index in coarse:
            placed[index] = (field, words, shared, base)
            base += counts[index]
        widths.append((width, CODES_PER_WORD * (words + shared)))
        field += len(PLANES[width])
    rows = {width: codes // CODES_PER_WORD for width, codes in widths}
    levels, start = [], 0
    for index, level_bits in enumerate(bits):
        field, offset, words, base = placed[index]
        levels.append(LevelCodes(level_bits, counts[index], field, rows[level_bits], offset, words, base, start))
        start += 2**level_bits
    return PolarTree(head_dim, counts[-1], tuple(levels), tuple(widths))


@on_cpu()
def adjacent_order(head_dim: int, levels: int) -> torch.Tensor:
    """Channel of each code-space coordinate, such that halves pair neighbours in blocks of `2 ** levels`."""
    sides = torch.arange(head_dim).view(-1, *[2] * levels)
    return sides.permute(*range(levels, -1, -1)).flatten()


def encode(
    y: torch.Tensor, tree: PolarTree, books: tuple[AngleCodebook, ...]
) -> tuple[Fields, torch.Tensor, torch.Tensor]:
    """Bit planes of code-space vectors `y`, float32 `[..., D]`; reference of the encode kernel.

    Also returns the squared radii of the roots, and inner products of `y` with its unit code point, both float32
    `[..., roots]`.
    """
    low, high = y.chunk(2, -1)
    energy = low * low + high * high
    cross = y
    codes = []
    for index, book in enumerate(books):
        if index == 0:
            code = circle_codes(low, high, book)
        else:
            below, above = energy.chunk(2, -1)
            code = torch.zeros(below.shape, dtype=torch.int64, device=y.device)
            for cos2, sin2 in book.bounds:
                code += above * cos2 > below * sin2
            energy = below + above
        cos, sin = book.points[code].unbind(-1)
        left, right = cross.chunk(2, -1)
        cross = left * cos + right * sin
        codes.append(code)
    return pack(tree, codes), energy, cross


def circle_codes(x: torch.Tensor, y: torch.Tensor, book: AngleCodebook) -> torch.Tensor:
    """Code nearest to the angle of each (x, y): the number of boundaries below it, modulo the number of codes."""
    beyond = y < 0
    code = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for index, (cos, sin) in enumerate(book.bounds):
        turned = y * cos > x * sin
        code += (beyond | turned) if index < book.lower else (beyond & turned)
    return code & (len(book.points) - 1)


def pack(tree: PolarTree, codes: list[torch.Tensor]) -> Fields:
    """Pack the codes of all levels into the bit planes of `PolarTree.fields`."""
    fields: Fields = ()
    for bits, _ in tree.widths:
        members = [(level, code) for level, code in zip(tree.levels, codes, strict=True) if level.bits == bits]
        parts = [packing.pack(code, bits) for level, code in members if level.fills_words]
        coarse = [code for level, code in members if not level.fills_words]
        if coarse:
            joined = torch.cat(coarse, -1)
            padding = -joined.shape[-1] % CODES_PER_WORD
            parts.append(packing.pack(torch.nn.functional.pad(joined, (0, padding)), bits))
        fields += tuple(torch.cat(planes, -1) for planes in zip(*parts, strict=True))
    return fields


def unpack(tree: PolarTree, fields: Fields) -> list[torch.Tensor]:
    """Inverse of `pack`: int64 codes `[..., count]` of each level."""
    codes = []
    for level in tree.levels:
        planes = fields[level.field : level.field + len(PLANES[level.bits])]
        words = tuple(plane[..., level.offset : level.offset + level.words] for plane in planes)
        codes.append(packing.unpack(words, level.bits)[..., level.base : level.base + level.count])
    return codes


def expand(codes: list[torch.Tensor], radii: torch.Tensor, books: tuple[AngleCodebook, ...]) -> torch.Tensor:
    """Decode codes and radii `[..., roots]` to code-space vectors `[..., D]`."""
    for code, book in zip(reversed(codes), reversed(books), strict=True):
        cos, sin = book.points[code].unbind(-1)
        radii = torch.cat([radii * cos, radii * sin], -1)
    return radii


def angles(y: torch.Tensor, levels: int) -> list[torch.Tensor]:
    """Angles of each level, `[..., count]`: level 1 in [0, 2π), deeper ones in [0, π/2] (Han et al., Definition 1)."""
    low, high = y.chunk(2, -1)
    by_level = [torch.atan2(high, low).remainder(2 * torch.pi)]
    radii = torch.hypot(low, high)
    for _ in range(1, levels):
        low, high = radii.chunk(2, -1)
        by_level.append(torch.atan2(high, low))
        radii = torch.hypot(low, high)
    return by_level
