"""Tiles of the attention kernel that the GPU kit times beside the rule's, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_kit import tiles
from gpu_kit.tiles import tiles_to_time, time_tile

from kvcache_compress.bench.layers import Shape
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.common.operands import Tile

TINY = Shape(4, 2, 64)
CALL = ("turboquant-4bit", "tiny", TINY, 1, 64, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def test_tiles_most_like_the_rule_come_first() -> None:
    found = tiles_to_time("turboquant-4bit", TINY, 4)
    assert found == [Tile(64, 1, 2), Tile(64, 1, 4), Tile(32, 1, 3), Tile(64, 1, 1)]
    assert len(tiles_to_time("turboquant-4bit", TINY, 100)) == 47, "all up to 64 tokens but the rule's"
    assert {tile.tokens for tile in tiles_to_time("commvq-1bit", TINY, 100)} == {16, 32, 64, 128}


def test_a_tile_is_timed_beside_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(call: Any, device: torch.device, repeats: int) -> float:
        call()
        views = [cell.cell_contents for cell in call.__closure__ if isinstance(cell.cell_contents, View)]
        (keys,) = (view for view in views if view.side == "keys")
        return {Tile(32, 2, 3): 0.9, None: 1.0}[keys.codec.kernel_side.tile]

    monkeypatch.setattr(tiles, "median_ms", timer)
    found = time_tile(*CALL, Tile(32, 2, 3), 1)
    assert (found.block, found.warps, found.stages) == (32, 2, 3)
    assert (found.milliseconds, found.rule_milliseconds) == (0.9, 1.0)
    assert found.attention_error is not None
    assert 0 < found.attention_error < 2.8e-3


def test_a_wrong_tile_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = View.attend
    monkeypatch.setattr(View, "attend", lambda *call: 1.05 * attend(*call))
    with pytest.raises(ValueError, match="attention differs by"):
        time_tile(*CALL, Tile(16, 8, 4), 1)


def test_spilled_registers_are_refused() -> None:
    compiled = SimpleNamespace(n_regs=255, n_spills=0)
    kernels = {"map_query_kernel": None, "turn_kernel": None, "attend_kernel": compiled, "merge_kernel": None}
    launches = [SimpleNamespace(kernel=SimpleNamespace(__name__=name), compiled=one) for name, one in kernels.items()]
    side = SimpleNamespace(plans={"key": SimpleNamespace(launches=launches)})
    assert tiles.registers_of(side) == 255
    compiled.n_spills = 12
    with pytest.raises(ValueError, match="48 bytes of a thread's registers spill"):
        tiles.registers_of(side)
