"""Time attention with tiles like the one that the package's rule takes, beside that one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from kvcache_compress.bench.compare import compare_views
from kvcache_compress.bench.decode import random_view
from kvcache_compress.bench.layers import Shape, encoded_side, middle_layer, named_config
from kvcache_compress.bench.timing import median_ms
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.triton_kernels.attention.tiles import tile_shape
from kvcache_compress.triton_kernels.common.operands import Tile

TOKENS, WARPS, STAGES = (16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 3, 4)
"""Members of the tiles; 16 is the depth of the tensor cores' operands."""
USUAL_TOKENS = 64
"""Most tokens of a tile, unless the rule takes more: levels and weights of more tokens need many registers."""


@dataclass(frozen=True)
class TileTime:
    """Time of attention of one layer with a tile, and with the rule's.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: packed tokens of each sequence.
        block, warps, stages: the tile.
        registers: registers per thread; None in Triton's interpreter.
        milliseconds, rule_milliseconds: medians with this tile and with the rule's.
        attention_error: relative error of attention with this tile.
        error: why the tile cannot be used.
    """

    cache: str
    shape: str
    batch: int
    tokens: int
    block: int
    warps: int
    stages: int
    registers: int | None = None
    milliseconds: float | None = None
    rule_milliseconds: float | None = None
    attention_error: float | None = None
    error: str | None = None


def tiles_to_time(preset: str, shape: Shape, most: int) -> list[Tile]:
    """At most `most` tiles that both sides of a preset support, those most like the rule's first, without that one."""
    plan = middle_layer(named_config(preset))
    keys, values = (
        encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, torch.bfloat16,
            heads=shape.kv_heads, codes="random",
        ).codec.kernel_side
        for side in ("keys", "values")
    )  # fmt: skip
    by_rule = tile_shape(keys, values, False)
    largest = min(keys.most_tokens, values.most_tokens, max(USUAL_TOKENS, by_rule.tokens))

    def difference(tile: Tile) -> float:
        """Doublings between the tiles' tokens and warps, and half as much for each stage."""
        doublings = sum(abs(math.log2(ours / rules)) for ours, rules in zip(tile[:2], by_rule[:2], strict=True))
        return doublings + abs(tile.stages - by_rule.stages) / 2

    tiles = [Tile(*members) for members in product(TOKENS, WARPS, STAGES) if members[0] <= largest]
    return sorted((tile for tile in tiles if tile != by_rule), key=difference)[:most]


def time_tile(
    preset: str, name: str, shape: Shape, batch: int, tokens: int, device: torch.device, tile: Tile, repeats: int
) -> TileTime:
    """Compare attention over `tokens` packed tokens with this tile to plain attention, and time it beside the rule's.

    Raises:
        ValueError: attention is wrong, or registers spill.
    """
    keys, values, query = random_view(preset, shape, batch, tokens, device, torch.bfloat16)
    k_side, scaling, times = keys.codec.kernel_side, shape.head_dim**-0.5, []
    assert k_side is not None
    k_side.use_tile(tile)
    error, problem = compare_views(keys, values, query, scaling)
    if problem is not None:
        raise ValueError(problem)
    registers = registers_of(k_side)
    for used in (tile, None):
        k_side.use_tile(used)
        times.append(median_ms(lambda: keys.attend(AttentionCall.of(query, scaling=scaling), values), device, repeats))
    return TileTime(preset, name, batch, tokens, *tile, registers, *times, error)


def registers_of(k_side: Any) -> int | None:
    """Registers per thread of the attention kernel that was launched last; raises `ValueError` if it spills."""
    (plan,) = k_side.plans.values()
    compiled = next(launch.compiled for launch in plan.launches if launch.kernel.__name__ == "attend_kernel")
    if compiled is None:
        return None
    if compiled.n_spills:
        raise ValueError(f"{4 * compiled.n_spills} bytes of a thread's registers spill to memory")
    return int(compiled.n_regs)
