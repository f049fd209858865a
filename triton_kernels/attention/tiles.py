"""The tile of the attention kernel, by a rule from the compiler's figures."""

from __future__ import annotations

from kvcache_compress.triton_kernels.common.operands import KernelSide, Tile


def tile_shape(k_side: KernelSide, v_side: KernelSide, exact: bool) -> Tile:
    """Tile with which levels and accumulators of both sides stay in registers; `exact` for float32 queries.

    One warp if that is enough: the 16 rows of the tensor cores' tile cannot be split, so more warps repeat work. A tile
    set by `KernelSide.use_tile` goes first.
    """
    if k_side.tile is not None:
        return k_side.tile
    if exact:
        return Tile(16, 8, 2)
    widest = max(*k_side.widths, *v_side.widths)
    warps = max(k_side.warps, v_side.warps, widest // 16 if widest > 128 else 1)
    return Tile(min(k_side.tokens, v_side.tokens), min(warps, 8), 3)
