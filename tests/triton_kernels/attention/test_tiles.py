"""Tiles of the attention kernel: by rule, unless one is set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.kernels.attention_cases import BARS, BF16, Case, error, kivi, plain_attention, segments, tq

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.attention.launch import tile_shape
from kvcache_compress.triton_kernels.common.operands import Tile


def test_launches_have_the_tile_of_the_rule_or_the_one_that_is_set(make_side: Callable[..., View]) -> None:
    case = Case(kivi(4), tq(3), dtype=BF16, packed=96)
    keys, values = segments(case, make_side)
    k_side, v_side = keys.codec.kernel_side, values.codec.kernel_side
    query = torch.randn(2, 6, 1, 64).to(BF16)
    by_rule = tile_shape(k_side, v_side, False)
    assert by_rule.tokens != 16
    for tile in (None, Tile(16, 2, 2), None):
        k_side.use_tile(tile)
        out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
        ((_, plan),) = k_side.plans.items()
        arguments = plan.launches[1].constant
        assert (arguments["BLOCK"], arguments["num_warps"], arguments["num_stages"]) == (tile or by_rule)
        assert error(out, plain_attention(query, keys, values, None, case, None)) <= BARS[BF16]
    assert tile_shape(k_side, v_side, True) == Tile(16, 8, 2)
