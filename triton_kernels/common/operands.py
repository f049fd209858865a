"""Operands that a codec hands to the attention and encode kernels for its side (keys or values)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kvcache_compress.codecs.base import Side
from kvcache_compress.codecs.layout import code_order, padded_width, padded_words

from .codes import tile_width
from .plan import KernelCall, Plan, portable


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`; Triton's own takes ten times as long."""
    return 1 << (n - 1).bit_length()


def launch_options(fusion: bool = True) -> dict[str, Any]:
    """Options of every launch: without `maxnreg`, ptxas aims at a round number of registers and spills to meet it.

    Fusion of multiplications and additions is explicit, as Triton's default changes with version 3.10. It is off where
    products are summed over lanes: two lanes that exchange products would each round only the other's product, and
    their sums would differ. The hardware then chooses which sum is stored, and lanes may encode a token by different
    norms.
    """
    return {"enable_fp_fusion": fusion} | ({} if portable() else {"maxnreg": 255})


def is_fast(dtype: torch.dtype) -> bool:
    """True if attention with queries of this dtype takes the fast path."""
    return dtype != torch.float32 and not portable()


class Tile(NamedTuple):
    """Tokens that a program of `attend_kernel` processes at a time, its warps, and its pipeline stages."""

    tokens: int
    warps: int
    stages: int


class SideForm(NamedTuple):
    """Compile-time constants of a side in the attention kernel.

    meta, widths, fours, group: as in `KernelSide`; dim: head dimension of dense tokens.
    words, places: how many of `KernelSide.words` are tiles of their own, and how many share the last tiles.
    bias: True if a term is added to all scores of a query; rope: numbers of cos and sin per group that the side reads.
    eras: True if keys have several eras.
    """

    meta: tuple[Any, ...]
    widths: tuple[int, ...]
    fours: tuple[bool, ...]
    words: int
    places: int
    dim: int
    bias: bool
    rope: int
    group: int
    eras: bool


@dataclass(eq=False)
class KernelSide:
    """One side's device function and constant operands.

    function: the Triton device function that scores keys or accumulates values; see `dense.py` for their contracts.
    meta: its compile-time parameters, a named tuple.
    widths: widths of the code-space tiles, powers of two of at least 16.
    tables: constant tensors that it reads, cast to the dtype of the operands if they are floating-point. More may
        follow in the tuple that it gets, so it indexes it from the front.
    words: int32 constants of its fast path, which stay in registers (see `lookup.py`): each becomes a tile `[1, 1]`,
        and the last `places` of them tiles `[1, n]`, one for each power of two in `places`, largest first.
    tokens, warps: most tokens per tile, and warps per program, that it works best with in 16 bits.
    matrix: float32, None for the identity. Of keys `[H or 1, D, sum(widths)]`, contiguous, queries to code space, with
        one more column if a term is added to all scores of a query. Of values `[H or 1, sum(widths), D]`, code space to
        outputs. Of keys with a `map_call`, `[1, 1, 1]`: the unit of the scores.
    headroom: largest mapped query.
    map_call: keys only, makes the launch that maps queries for each group of tokens, in place of
        `query.map_query_call` (`spectral.turn_call`). Its map is the first table.
    group: tokens that share the cos and sin of the first of them; with a `map_call`, those that share its queries.
    by_head: keys only, indices of the tables that depend on statistics, `[H, ...]`.
    eras: of keys of several eras (`eras.py`): their number, first tokens, and the largest integer, int32; else None.
    fours: keys only, which tiles of the fast path `assembly.joined` puts in the order of mapped queries.
    plans, sizes: keys only, launches that later steps repeat and sizes of splits, by what calls have in common.
    joined: keys only, this side with older eras, by the dtype of queries and the eras.
    """

    function: Any
    meta: tuple[Any, ...]
    widths: tuple[int, ...]
    tables: tuple[torch.Tensor, ...] = ()
    words: torch.Tensor | None = None
    places: int = 0
    tokens: int = 32
    warps: int = 1
    matrix: torch.Tensor | None = None
    headroom: float = 1.0
    map_call: Callable[..., KernelCall] | None = None
    group: int = 1
    by_head: tuple[int, ...] = ()
    eras: torch.Tensor | None = None
    fours: tuple[bool, ...] = ()
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    sizes: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    joined: dict[tuple[Any, ...], KernelSide] = field(default_factory=dict)
    _cast: dict[torch.dtype, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def tables_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Tables cast to `dtype`, once."""
        if dtype not in self._cast:
            self._cast[dtype] = tuple(
                (table.to(dtype) if table.is_floating_point() else table).contiguous() for table in self.tables
            )
        return self._cast[dtype]

    def operands(self, dtype: torch.dtype, dim: int, rope: int) -> tuple[tuple[torch.Tensor, ...], SideForm]:
        """Constant tensors for queries of this dtype, and the form; the words of the fast path are last, if any."""
        tables = self.tables_as(torch.float32 if dtype == torch.float32 else torch.float16)
        words, places = 0, 0
        fours = self.fours if self.fours and is_fast(dtype) else (False,) * len(self.widths)
        if is_fast(dtype) and self.words is not None:
            tables, words, places = (*tables, self.words), len(self.words) - self.places, self.places
        bias = self.matrix is not None and self.matrix.shape[-1] > sum(self.widths)
        return tables, SideForm(
            self.meta, self.widths, fours, words, places, dim, bias, rope, self.group, self.eras is not None
        )

    def ready(self, dtype: torch.dtype, side: Side) -> None:
        """Make what calls with queries of this dtype keep."""
        self.operands(dtype, 0, 0)
        if side == "keys" and self.matrix is not None:
            self.query_bound  # noqa: B018 - cached

    @cached_property
    def query_bound(self) -> torch.Tensor:
        """Divisor, float32 `[]`, that keeps mapped queries within `headroom`, for queries of magnitude 1."""
        assert self.matrix is not None
        return self.matrix[..., : sum(self.widths)].abs().sum(-2).max() / self.headroom

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that this side holds on the device."""
        single = (self.matrix, self.words, self.eras, vars(self).get("query_bound"))
        cast = (table for tables in self._cast.values() for table in tables)
        joined = (table for side in self.joined.values() for table in side.tensors())
        return (*self.tables, *cast, *joined, *(table for table in single if table is not None))


@dataclass(frozen=True, eq=False)
class KernelEncoder:
    """One side's encoder of tokens, for a single launch.

    encode: a Triton device function `(tile, D, META, PRECISION)` that encodes a `codes.NewTile`.
    meta: its compile-time parameters, a named tuple.
    tables: constant tensors that it reads.
    group: tokens that are encoded together, a power of two; a tile of `T` tokens has whole groups.
    """

    encode: Any
    meta: tuple[Any, ...]
    tables: tuple[torch.Tensor, ...] = ()
    group: int = 1

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What a launch with this encoder is compiled for: function, constants, and dtypes of the tables."""
        return self.encode, self.meta, self.group, tuple([x.dtype for x in self.tables])


def with_mean(query_map: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Append the keys' mean `[H, D]`, if any, to `query_map` `[H or 1, D, W]` as a last column; contiguous."""
    if mean is None:
        return query_map.contiguous()
    return torch.cat([query_map.expand(len(mean), -1, -1), mean[..., None]], -1)


def code_tiles(width: int) -> tuple[int, ...]:
    """Widths of the tiles that `load_codes` returns for `width` codes per token."""
    tile = tile_width(padded_words(width))
    return (tile,) * (padded_width(width) // tile)


def in_code_order(basis: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """Move rows of `basis` `[H, sum(widths), D]` to the kernels' padded code order, `[H, sum(padded), D]`."""
    if all(padded_width(width) == width for width in widths):
        return basis
    parts = []
    for width, rows in zip(widths, basis.split(widths, dim=1), strict=True):
        part = rows.new_zeros(rows.shape[0], padded_width(width), rows.shape[2])
        part[:, code_order(width).to(rows.device)] = rows
        parts.append(part)
    return torch.cat(parts, 1)
