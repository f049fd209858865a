"""CommVQ's values as weights summed by code: when they are used, what is summed, and how sums become outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import BARS, F16, Case, attention_error, error, plain_attention, segments
from support.commvq_files import codebook_file

from kvcache_compress.storage.segments import SideSegments
from kvcache_compress.storage.slots import Slots
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.attention.kernel import attend_kernel, merge_kernel
from kvcache_compress.triton_kernels.attention.query import map_query_arguments, map_query_kernel
from kvcache_compress.triton_kernels.common.operands import KernelSide
from kvcache_compress.triton_kernels.decode import commvq, commvq_sums

MakeSide = Callable[..., SideSegments]


def values(**shape: Any) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "commvq", lambda head_dim: {"codebooks": codebook_file(head_dim, **shape)}


def side_of(make_side: MakeSide, head_dim: int = 64, **shape: Any) -> KernelSide:
    name, options = values(**shape)
    return make_side(name, options(head_dim), "values", head_dim, 32, dtype=F16).codec.kernel_side


def attended(
    case: Case, make_side: MakeSide, splits: tuple[int, int], slots: Slots | None = None
) -> tuple[torch.Tensor, tuple[SideSegments, SideSegments], dict[str, Any], Any]:
    """Run `attend_kernel`: the query, the segments, its arguments, and the launches that follow."""
    keys, stored = (replace(side, slots=slots) for side in segments(case, make_side))
    query = torch.randn(2, 2 * case.groups, case.count, case.head_dim).to(case.dtype)
    sizes = launch.Sizes(*splits, False, launch.Tile(case.block, 8, 2))
    grid, mapping = map_query_arguments(query, keys.codec.kernel_side, 2, case.head_dim**-0.5)
    map_query_kernel[grid](**mapping)
    inputs, kind = launch.attend_inputs(query, keys, stored, None, sizes.split_tokens)
    grid, arguments = launch.attend_arguments(
        query, keys, stored, inputs, kind, mapping, sizes, scaling=case.head_dim**-0.5, softcap=None, mask_packed=False
    )
    attend_kernel[grid](**arguments)
    out = torch.empty(2, case.count, 2 * case.groups, case.head_dim, dtype=torch.float32, device=query.device)
    return query, (keys, stored), arguments, launch.merge_calls(query, keys, stored, None, arguments, out)


def test_which_calls_sum_by_code(make_side: MakeSide) -> None:
    side = side_of(make_side)
    assert side.for_rows(8, exact=False, amd=False).accumulate is commvq_sums.accumulate_sums
    for rows, exact, amd in ((9, False, False), (8, True, False), (8, False, True)):
        assert side.for_rows(rows, exact, amd) is side
    assert side.accumulate is commvq.accumulate


@pytest.mark.parametrize(("rounds", "fits"), [(32, True), (33, False)])
def test_sums_that_registers_cannot_hold_are_not_made(make_side: MakeSide, rounds: int, fits: bool) -> None:
    """Eight warps hold 4,096 sums of 8 rows, of 64 codes with 64 centres."""
    assert (side_of(make_side, value_shape=(2 * rounds, 64)).few_rows is not None) == fits


@pytest.mark.parametrize(("centres", "bits"), [(2, 1), (4, 2), (8, 3), (16, 4), (32, 5), (64, 6), (256, 8)])
def test_sums_are_cumulated_weights(make_side: MakeSide, centres: int, bits: int) -> None:
    """Sum k, c of a split is that of the weights of tokens whose code k is at least c."""
    case = Case(("none", {}), values(value_shape=(5, centres)), dtype=F16, packed=48, block=32)
    query, (keys, stored), arguments, _ = attended(case, make_side, (48, 1))
    fields = stored.store.read(0, 48)
    codes = unpacked(fields[0], 5, bits)
    keys_packed = keys.codec.decode(keys.store.read(0, 48))
    logits = torch.einsum("bhgd,bhtd->bhgt", query.view(2, 2, 3, 64).float(), keys_packed.float()) * 0.125
    reference = arguments["p_stats"][:, :, 0, :, 0]
    weights = (logits * 1.4426950408889634 - reference[..., None]).exp2() * fields[1].float()[:, :, None]
    at_least = codes[..., None] >= torch.arange(max(16, centres))
    expected = torch.einsum("bhgt,bhtkc->bhgkc", weights, at_least.float())
    sums = arguments["p_acc"][:, :, 0].view(2, 2, 3, 2, 8, max(16, centres))  # of codes 2 u and 2 u + 1 of unit u
    found = sums.transpose(3, 4).flatten(3, 4)[:, :, :, :5]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def unpacked(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Codes of `bits` bits, bit by bit, `[..., count]`."""
    stream = (packed[..., None] >> torch.arange(8)) & 1
    return (stream.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits)) << torch.arange(bits)).sum(-1)


CASES = {
    "the largest tile": Case(values=values(value_shape=(21, 64)), packed=128, block=64, split=(64, 2)),
    "masks": Case(
        values=values(value_shape=(7, 64)), groups=2, count=3, mask="bool", hidden=44, packed=97, split=(64, 2)
    ),
    "masks that differ": Case(
        values=values(groups=2, value_shape=(3, 64)), count=2, mask="float", rows_differ=True, packed=97, split=(64, 2)
    ),
    "eight rows": Case(values=values(value_shape=(4, 256)), groups=4, count=2),
    "codes in rows of other heads": Case(values=values(value_shape=(9, 64), shared=True), groups=8, head_dim=128),
    "with a cap and a sink logit": Case(values=values(), softcap=5.0, s_aux=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_plain_attention(name: str, make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], dtype=F16)
    torch.manual_seed(len(name))
    keys, stored = segments(case, make_side)
    monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(case.block, 8, 2))
    monkeypatch.setattr(launch, "split_sizes", lambda *_: case.split)
    assert attention_error(launch.attend, case, keys, stored) <= BARS[F16]


def test_splits_without_tokens(make_side: MakeSide) -> None:
    """With a fixed capacity, programs beyond the tokens in memory leave sums of zero; the first part has all weight."""
    case = Case(values=values(value_shape=(7, 64)), dtype=F16, packed=160, block=32)
    sinks, tail = 3, 5
    slots = Slots(sinks, 160, tail, sinks + 160 + tail, torch.tensor(sinks + 64 + tail), torch.tensor(64))
    query, sides, _, calls = attended(case, make_side, (32, 5), slots)
    (fold, grid, folding), (merge, merge_grid, merging) = calls
    assert fold is commvq_sums.fold_kernel
    assert merge is merge_kernel
    fold[grid](**folding)
    merge[merge_grid](**merging)
    weights = folding["p_part_stats"][:, :, : folding["p_parts"].shape[2], :, 1]
    assert (weights[:, :, 0] > 0).all()
    assert (weights[:, :, 1:] == 0).all()
    shown = [replace(side, packed=64, slots=None) for side in sides]
    assert error(merging["p_out"], plain_attention(query, *shown, None, case, None)) <= BARS[F16]
