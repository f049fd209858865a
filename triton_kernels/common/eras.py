"""Keys of several eras as one side, and the part of one era that a program takes.

The sides of all eras have the same form. Only numbers that depend on statistics differ: they stand one era behind the
other along the heads, so that head `h` of era `e` is head `e H + h`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kvcache_compress.storage.adaptive.eras import Era

from .operands import KernelSide
from .plan import MAX_NARROW, kept


def joined(eras: tuple[Era, ...], dtype: torch.dtype) -> KernelSide:
    """The side of keys of several eras, for queries of this dtype; the newest era's side keeps it.

    Older eras drop their own sides, and with these what they joined before. A new era makes them again: it is rare, and
    the memory would be held all the time.
    """
    newest = eras[-1].codec.kernel_side
    key = (dtype, eras[-1].start, *eras[:-1])
    found: KernelSide | None = newest.joined.get(key)
    if found is None:
        found = kept(newest.joined, key, _joined(eras, dtype))
        for era in eras[:-1]:
            vars(era.codec).pop("kernel_side", None)
    return found


def _joined(eras: tuple[Era, ...], dtype: torch.dtype) -> KernelSide:
    sides: list[KernelSide] = [era.codec.kernel_side for era in eras]
    newest, heads, device = sides[-1], eras[-1].codec.context.heads, eras[-1].codec.context.device
    assert all((side.meta, side.widths) == (newest.meta, newest.widths) for side in sides)
    operand = torch.float32 if dtype == torch.float32 else torch.float16
    by_table = zip(*(side.tables_as(operand) for side in sides), strict=True)
    tables = [torch.cat(parts) if i in newest.by_head else parts[-1] for i, parts in enumerate(by_table)]
    maps = [side.matrix for side in sides if side.matrix is not None]
    if newest.map_call is None:
        matrix = torch.cat([x.expand(heads, -1, -1) for x in maps])
    else:
        # Units differ by powers of two. Eras share the largest; the map takes what is less.
        units = torch.stack([x.amax() for x in maps])
        matrix = maps[-1] * (units.amax() / units[-1])
        tables[0] *= (units / units.amax()).repeat_interleave(heads)[:, None, None].to(tables[0].dtype)
    return replace(
        newest, tables=tuple(tables), matrix=matrix,
        eras=torch.tensor([len(eras), *(era.start for era in eras), MAX_NARROW], dtype=torch.int32, device=device),
        plans={}, sizes={}, joined={}, _cast={},
    )  # fmt: skip


@triton.jit
def era_part(p_eras, i, n_packed, size, rows, GROUP: tl.constexpr):
    """Era of part `i`, its first row and its last row + 1, if each era is cut into parts of at most `size` rows.

    A group of packed tokens has `rows` rows. Parts beyond the last are empty.
    """
    era, first, stop = 0, 0, 0
    for e in range(tl.load(p_eras)):
        start = tl.minimum(tl.load(p_eras + 1 + e), n_packed) // GROUP * rows
        end = tl.minimum(tl.load(p_eras + 2 + e), n_packed) // GROUP * rows
        parts = tl.cdiv(end - start, size)
        if (i >= 0) & (i < parts):
            era, first, stop = e, start + i * size, tl.minimum(start + i * size + size, end)
        i -= parts
    return era, first, stop
