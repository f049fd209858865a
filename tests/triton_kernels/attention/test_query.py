"""Mapping of queries to code space, and split sizes for a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.attention.query import map_query_arguments, map_query_kernel

LOG2E = math.log2(math.e)
METHODS = {
    "turboquant": ("turboquant", {"bits": 3, "center": "on"}),
    "not centred": ("turboquant", {"bits": 4, "center": "off"}),
    "fractional": ("turboquant", {"bits": 2.5}),
    "qjl": ("qjl", {"sketch_ratio": 3}),
    "none": ("none", {}),
}


@pytest.mark.parametrize(
    ("name", "dim", "dtype"),
    [
        *((name, dim, torch.bfloat16) for name, dim in zip(METHODS, (64, 80, 64, 80, 64), strict=True)),
        *((name, 80, torch.float32) for name in ("turboquant", "not centred")),
    ],
)
def test_mapped_queries_factors_and_biases(
    name: str, dim: int, dtype: torch.dtype, make_side: Callable[..., View]
) -> None:
    side = make_side(*METHODS[name], "keys", dim, 32, dtype=dtype).codec.kernel_side
    query = (100 * torch.randn(2, 6, 3, dim)).to(dtype)
    grid, arguments = map_query_arguments(query, side, 2, 0.5)
    map_query_kernel[grid](**arguments)
    mapped, (factor, bias) = arguments["p_mapped"], arguments["p_rows"].unbind(-1)
    rows = query.view(2, 2, 9, dim).double()
    whole = rows if side.matrix is None else rows @ side.matrix.double()
    width = sum(side.widths)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert mapped.dtype == (torch.float32 if dtype == torch.float32 else torch.float16)
    # Of 16 columns, a lane of the tensor cores' operand holds 2 i, 2 i + 1, 2 i + 8 and 2 i + 9, side by side.
    order = torch.arange(width).view(-1, 2, 4, 2).transpose(1, 2).flatten()
    whole = torch.cat([whole[..., order], whole[..., width:]], -1)
    restored = mapped.double() * (factor.double() / (0.5 * LOG2E))[..., None]
    assert (restored - whole[..., :width]).norm() <= tolerance * whole[..., :width].norm()
    if dtype != torch.float32:
        assert mapped.abs().max() <= side.headroom
    if side.bias:
        torch.testing.assert_close(bias.double(), whole[..., width] * 0.5 * LOG2E, rtol=1e-5, atol=1e-3)
    else:
        assert (bias == 0).all()


@pytest.mark.parametrize("packed", [32, 96, 1000, 4096, 131072])
@pytest.mark.parametrize("programs", [1, 8, 64, 4096])
@pytest.mark.parametrize("more", [0, 7])
def test_splits_cover_the_tokens_and_are_not_short(packed: int, programs: int, more: int) -> None:
    """Eight eras may have seven splits more than one."""
    tile = launch.Tile(32, 1, 2)
    size, splits = launch.split_sizes(packed, tile, programs, 8, more)
    assert size % tile.tokens == 0
    assert (splits - 1) * size < packed <= splits * size
    assert splits + more <= launch.MAX_SPLITS
    assert splits == 1 or size >= launch.MIN_SPLIT_TOKENS
    rounds = (splits + more) * programs / (8 * launch.RESIDENT_WARPS)
    assert splits == 1 or rounds <= (launch.ROUNDS if size >= launch.MIN_ROUND_TOKENS else 1)
