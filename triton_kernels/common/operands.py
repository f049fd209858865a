"""What a codec hands to the attention kernel for its side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvcache_compress.codecs.layout import code_order, padded_width, padded_words

from .codes import tile_width
from .plan import AMD, Plan

if TYPE_CHECKING:
    from kvcache_compress.triton_kernels.attention.tiles import Tile


def next_power_of_2(n: int) -> int:
    """As Triton's own, which takes ten times as long since it is a function of its language too."""
    return 1 << (n - 1).bit_length()


def launch_options(amd: bool = AMD, fusion: bool = True) -> dict[str, Any]:
    """Options of launches. Left alone, ptxas aims at a round number of registers and spills words to meet it.

    Whether multiplications and additions are fused is said, since Triton's default changes with version 3.10.
    """
    return {"enable_fp_fusion": fusion} | ({} if amd else {"maxnreg": 255})


class SideForm(NamedTuple):
    """Compile-time constants of a side in the attention kernel.

    meta, widths: as in `KernelSide`; width: columns of code space, the sum of `widths`.
    words, places: of `KernelSide.words`, those that are tiles of their own, and those of the last tile.
    dim, padded: numbers of a dense token, and the power of two that holds them.
    bias: of keys, whether a term is added to all scores of a query; rope: cos and sin of a token, or 0 without.
    """

    meta: tuple[Any, ...]
    widths: tuple[int, ...]
    width: int
    words: int
    places: int
    dim: int
    padded: int
    bias: bool
    rope: int


@dataclass(eq=False)
class KernelSide:
    """One side's device functions and constant operands.

    score, accumulate: the two Triton device functions; see `dense.py` for their contract by example.
    meta: compile-time parameters of both functions, a named tuple.
    widths: widths of the code-space tiles, powers of two of at least 16.
    tables: constant tensors that the functions read, in float32; they get them in the dtype of the operands, and after
        them what may not be read, so that they count from the first.
    words: int32 constants for the functions' fast path, which stay in registers (see `lookup.py`); they get each as a
        tile `[1, 1]`, and the last `places` of them as one more tile `[1, places]`.
    tokens, warps: tokens of a tile, at most, and warps of a program that suit the functions with 16-bit operands.
    most_tokens: tokens of a tile that the functions can take, at most.
    tile: of a side of keys, what `use_tile` set.
    query_map: float32 `[H or 1, D, sum(widths) (+ 1)]`, contiguous, queries to code space; None is the identity.
    bias: whether the last column of `query_map` gives a term that is added to all scores of a query.
    output_map: float32 `[H or 1, sum(widths), D]`, code space to outputs; None is the identity.
    plans, sizes: of a side of keys, launches that later steps repeat and sizes of splits, by what calls have in common.
    """

    score: Any
    accumulate: Any
    meta: tuple[Any, ...]
    widths: tuple[int, ...]
    tables: tuple[torch.Tensor, ...] = ()
    words: torch.Tensor | None = None
    places: int = 0
    tokens: int = 32
    warps: int = 1
    most_tokens: int = 128
    tile: Tile | None = None
    query_map: torch.Tensor | None = None
    bias: bool = False
    output_map: torch.Tensor | None = None
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    sizes: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _bound: torch.Tensor | None = None
    _cast: dict[torch.dtype, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def use_tile(self, tile: Tile | None) -> None:
        """Of a side of keys: from now on attention takes this tile, or with None the one that it chooses itself."""
        self.tile = tile
        self.sizes.clear()
        self.plans.clear()

    def tables_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        if dtype not in self._cast:
            self._cast[dtype] = tuple(table.to(dtype).contiguous() for table in self.tables)
        return self._cast[dtype]

    def operands(
        self, dtype: torch.dtype, fast: bool, dim: int, rope: int
    ) -> tuple[tuple[torch.Tensor, ...], SideForm]:
        """Its constant tensors, of this dtype, and its form; `fast` with the words of the fast path, if it has one.

        dim: numbers of a dense token; rope: those of cos and sin of a token that the side reads.
        """
        tables, words, places = self.tables_as(dtype), 0, 0
        if fast and self.words is not None:
            tables, words, places = (*tables, self.words), len(self.words) - self.places, self.places
        padded = max(16, next_power_of_2(dim))
        form = SideForm(self.meta, self.widths, sum(self.widths), words, places, dim, padded, self.bias, rope)
        return tables, form

    def query_bound(self) -> torch.Tensor:
        """Largest 1-norm of a column of `query_map`: what a query of largest magnitude 1 can become. Float32 `[]`."""
        if self._bound is None:
            assert self.query_map is not None
            self._bound = self.query_map[..., : sum(self.widths)].abs().sum(-2).max()
        return self._bound

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that this side holds on the device."""
        maps = (self.query_map, self.output_map, self.words, self._bound)
        cast = (table for tables in self._cast.values() for table in tables)
        return (*self.tables, *cast, *(table for table in maps if table is not None))


@dataclass(frozen=True, eq=False)
class KernelEncoder:
    """How one side encodes tokens in a single launch.

    encode: a Triton device function `(p_x, o_x, m_t, fields, o_row, tables, i_h, D, META, PRECISION)` that encodes the
        tokens of head `i_h` whose `D` numbers begin at `p_x + o_x`, `[T]`, where `m_t`, and stores what becomes of them
        as tokens `o_row` of all fields.
    meta: its compile-time parameters, a named tuple.
    tables: constant tensors that it reads.
    group: tokens that are encoded together, a power of two; a tile of `T` tokens has whole groups.
    fused: whether products may be added without being rounded: not where codes are to equal torch's to the bit.
    """

    encode: Any
    meta: tuple[Any, ...]
    tables: tuple[torch.Tensor, ...] = ()
    group: int = 1
    fused: bool = True


def with_mean(query_map: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """`query_map` `[H or 1, D, W]`, contiguous, with the keys' mean `[H, D]`, where there is one, as a last column."""
    if mean is None:
        return query_map.contiguous()
    return torch.cat([query_map.expand(len(mean), -1, -1), mean[..., None]], -1)


def code_tiles(width: int) -> tuple[int, ...]:
    """Widths of the tiles that `load_codes` makes of `width` codes per token."""
    tile = tile_width(padded_words(width))
    return (tile,) * (padded_width(width) // tile)


def in_code_order(basis: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """Rows of `basis` `[H, sum(widths), D]` moved to the kernels' padded code order, `[H, sum(padded), D]`."""
    if all(padded_width(width) == width for width in widths):
        return basis
    parts = []
    for width, rows in zip(widths, basis.split(widths, dim=1), strict=True):
        part = rows.new_zeros(rows.shape[0], padded_width(width), rows.shape[2])
        part[:, code_order(width).to(rows.device)] = rows
        parts.append(part)
    return torch.cat(parts, 1)
