"""Tiles of the attention kernel: from the table of measured tiles, or else by rule; entries must be valid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
import torch
from support.attention_cases import BARS, BF16, Case, error, kivi, plain_attention, segments, tq
from support.device import DEVICE

from kvcache_compress.bench.layers import SHAPES, VARIANTS, build_codec, middle_layer, named_config
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.config import preset_names
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels import aot
from kvcache_compress.triton_kernels.attention import launch, tiles
from kvcache_compress.triton_kernels.common.operands import KernelSide, Tile


@pytest.fixture(autouse=True)
def _tables_of_one_test() -> Iterator[None]:
    yield
    tiles.measured.cache_clear()


@pytest.fixture
def use_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[str, dict[str, Any]], None]:
    """Function `use_table(kernel, tile)` that sets a table with this single entry, for "9.0"."""

    def use(kernel: str, tile: dict[str, Any]) -> None:
        path = tmp_path / "tiles.json"
        path.write_text(json.dumps({"9.0": {kernel: {"tile": tile}}}))
        monkeypatch.setattr(tiles, "TABLE", path)
        tiles.measured.cache_clear()

    return use


def sides(name: str, head_dim: int = 64, heads: int = 2) -> tuple[KernelSide, KernelSide]:
    plan = middle_layer(named_config(name))
    found = []
    for side in ("keys", "values"):
        part = plan.side(side)
        codec = build_codec(part.method, part.options(), side, head_dim, heads, torch.bfloat16, DEVICE)
        codec.prepare(torch.randn(1, heads, 128, head_dim).bfloat16())
        found.append(codec.kernel_side)
    return found[0], found[1]


def test_an_entry_is_taken_for_its_kernel_and_device_alone(use_table: Callable[..., None]) -> None:
    keys, values = sides("turboquant-4bit")
    by_rule = tiles.rule(keys, values, False)
    best = Tile(16, 4, 3)
    assert best != by_rule
    use_table(tiles.kernel_name(keys, values, False), best._asdict())
    assert tiles.tile_shape(keys, values, False, 4, "9.0") == best
    assert tiles.tile_shape(keys, values, False, 16, "9.0") == best
    for exact, rows, capability in ((False, 17, "9.0"), (False, 4, "10.0"), (False, 4, None), (True, 4, "9.0")):
        assert tiles.tile_shape(keys, values, exact, rows, capability) == tiles.rule(keys, values, exact)
    for other in ("turboquant-3bit", "turboquant-k4v2", "kivi-4bit"):
        others = sides(other)
        assert tiles.tile_shape(*others, False, 4, "9.0") == tiles.rule(*others, False)
    others = sides("turboquant-4bit", head_dim=128)
    assert tiles.tile_shape(*others, False, 4, "9.0") == tiles.rule(*others, False)
    # The same kernel again, in another layer of the same widths.
    assert tiles.tile_shape(*sides("turboquant-4bit", heads=4), False, 4, "9.0") == best


def test_the_name_of_a_kernel_is_what_it_is_compiled_for() -> None:
    meta = "bits=(4,), words=(8,), padded=(8,), field=(0,), even=(False,), trellis=(False,), first=(0,), tile=(0,)"
    meta += ", placed=(False,)"
    expected = f"float16: turboquant.score({meta}) 4x16; turboquant.accumulate({meta}) 4x16"
    assert tiles.kernel_name(*sides("turboquant-4bit"), exact=False) == expected


def test_sizes_and_launches_are_those_of_the_entry(
    use_table: Callable[..., None], make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and launches follow the entry, also ahead of time for targets of that capability; results are right."""
    case = Case(kivi(4), tq(3), dtype=BF16, packed=96)
    keys, values = segments(case, make_side)
    k_side, v_side = keys.codec.kernel_side, values.codec.kernel_side
    use_table(tiles.kernel_name(k_side, v_side, False), {"tokens": 16, "warps": 4, "stages": 1})
    query = torch.randn(2, 6, 1, 64).to(BF16)
    for target, capability in (("sm_90", "9.0"), ("sm_80", "8.0"), ("sm_100", "10.0"), ("gfx942", None)):
        assert aot.capability(target) == capability
        tile = launch.sizes_of(query, keys, values, capability).tile
        assert tile == (Tile(16, 4, 1) if target == "sm_90" else tiles.rule(k_side, v_side, False))
    monkeypatch.setattr(launch, "capability_of", lambda device: "9.0")
    out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
    ((_, plan),) = k_side.plans.items()
    arguments = plan.launches[1].constant
    assert (arguments["BLOCK"], arguments["num_warps"], arguments["num_stages"]) == (16, 4, 1)
    assert error(out, plain_attention(query, keys, values, None, case, None)) <= BARS[BF16]
    k_side.use_tile(Tile(64, 2, 2))
    out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
    ((_, plan),) = k_side.plans.items()
    assert plan.launches[1].constant["BLOCK"] == 64
    assert error(out, plain_attention(query, keys, values, None, case, None)) <= BARS[BF16]


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"tokens": 24, "warps": 1, "stages": 2}, "tokens=24: allowed 16, 32, 64, 128"),
        ({"tokens": 8, "warps": 1, "stages": 2}, "tokens=8: allowed 16, 32, 64, 128"),
        ({"tokens": 32, "warps": 3, "stages": 2}, "warps=3: allowed 1, 2, 4, 8"),
        ({"tokens": 32, "warps": 1, "stages": 0}, "stages=0: allowed 1, 2, 3, 4"),
        ({"tokens": 32, "warps": 1}, "no table of tiles"),
        ([32, 1, 2], "no table of tiles"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(use_table: Callable[..., None], tile: Any, message: str) -> None:
    keys, values = sides("turboquant-4bit")
    use_table("a kernel", tile)
    with pytest.raises(ValueError, match=message):
        tiles.tile_shape(keys, values, False, 4, "9.0")
    with pytest.raises(ValueError, match="no table of tiles"):
        tiles.read_tiles("[]")


def test_candidates_have_no_more_tokens_than_the_sides_take() -> None:
    """A tile must not exceed PolarQuant's group of tokens that share a scale."""
    plan = middle_layer(named_config("polarquant-rope-4bit"))
    options = plan.keys.options().model_copy(update={"group_size": 32})
    codec = build_codec("polarquant_rope", options, "keys", 64, 2, torch.bfloat16, DEVICE)
    codec.prepare(torch.randn(1, 2, 128, 64).bfloat16())
    keys, values = codec.kernel_side, sides("turboquant-4bit")[1]
    assert {tile.tokens for tile in tiles.candidates(keys, values)} == {16, 32}
    assert {tile.tokens for tile in tiles.candidates(*sides("turboquant-4bit"))} == {16, 32, 64}
    larger = sides("commvq-1bit")
    assert {tile.tokens for tile in tiles.candidates(*larger)} == {16, 32, 64, tiles.rule(*larger, False).tokens}


def test_every_committed_entry_is_one_of_a_preset() -> None:
    """An entry of a kernel that no preset has is never used, and must be measured again or removed."""
    table = files("kvcache_compress.triton_kernels.attention") / "tiles.json"
    entries = tiles.read_tiles(table.read_text(encoding="utf-8"))
    if not any(entries.values()):
        return
    known: dict[str, tuple[KernelSide, KernelSide]] = {}
    for name in (*VARIANTS, *preset_names()):
        for shape in SHAPES.values():
            pair = sides(name, shape.head_dim, shape.kv_heads)
            known[tiles.kernel_name(*pair, exact=False)] = pair
    for kernels in entries.values():
        for name, tile in kernels.items():
            assert name in known
            assert tile in tiles.candidates(*known[name])


def test_nothing_is_looked_up_without_an_nvidia_gpu() -> None:
    assert tiles.capability_of(torch.device("cpu")) is None
