"""Mapping of queries to code space, and split sizes for a device."""

from __future__ import annotations

import pytest

from kvcache_compress.triton_kernels.attention import launch


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
