"""Scores of CommVQ's keys in a launch of their own: when there is one, what it writes, and attention that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention_cases import (
    BARS,
    BF16,
    F16,
    F32,
    Case,
    attention_error,
    error,
    plain_attention,
    segments,
)
from support.commvq_files import codebook_file

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.segments import SideSegments
from kvcache_compress.storage.slots import Slots
from kvcache_compress.triton_kernels.attention import launch, scores
from kvcache_compress.triton_kernels.attention.kernel import LOG2E, load_scores
from kvcache_compress.triton_kernels.decode import commvq

MakeSide = Callable[..., SideSegments]


def books(**shape: Any) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "commvq", lambda head_dim: {"codebooks": codebook_file(head_dim, **shape)}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK", 32)
    monkeypatch.setattr(scores, "PROGRAM_TOKENS", 64)


def bounded(keys: SideSegments, packed: int) -> Slots:
    """Slots of a fixed capacity, that of `keys`, with `packed` packed tokens in memory."""
    sinks, tail = keys.sinks.shape[2], keys.tail_tokens
    length, count = torch.tensor(sinks + packed + tail), torch.tensor(packed)
    return Slots(sinks, keys.packed, tail, sinks + keys.packed + tail, length, count)


def test_which_calls_score_before_attention(make_side: MakeSide) -> None:
    side = make_side(*books(), "keys", 64, 32, dtype=F16).codec.kernel_side
    few = side.for_rows(8, exact=False, amd=False)
    assert (few.score, few.parts) == (commvq.score_part, 1)
    for rows, exact, amd in ((9, False, False), (8, True, False), (8, False, True)):
        assert side.for_rows(rows, exact, amd) is side
    assert (side.score, side.parts) == (commvq.score, 0)


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "two parts of 32 pairs": (128, {"key_shape": (5, 64)}),
    "a part that is half padding": (96, {"key_shape": (3, 16), "weighed": True}),
    "four parts": (256, {"key_shape": (2, 16)}),
    "a part for each group": (128, {"groups": 2, "key_shape": (4, 16)}),
    "padded groups": (80, {"groups": 2, "key_shape": (3, 64), "weighed": True}),
    "codes in words": (64, {"key_shape": (21, 64)}),
    "codes in words and in other heads": (64, {"key_shape": (8, 64), "shared": True}),
    "rounds of which no run is whole": (64, {"key_shape": (1, 8)}),
    "codes of two bits": (64, {"key_shape": (16, 2)}),
}


@pytest.mark.parametrize("packed", [33, 128, 160])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("small_tiles")
def test_scores_are_products_with_decoded_keys(name: str, packed: int, make_side: MakeSide) -> None:
    head_dim, shape = SHAPES[name]
    case = Case(books(**shape), groups=2, count=2, head_dim=head_dim, dtype=F16, packed=packed)
    keys, values = segments(case, make_side)
    found = scored(keys, values, query := torch.randn(2, 4, 2, head_dim).to(F16), bound=None)
    assert error(found[:, :, :packed], products(keys, query)) <= BARS[F16]
    assert found[:, :, packed:].isnan().all(), "nothing is written after the last token"


@pytest.mark.usefixtures("small_tiles")
def test_scores_of_a_fixed_capacity_end_with_the_tokens_in_memory(make_side: MakeSide) -> None:
    keys, values = segments(Case(books(), groups=2, dtype=F16, packed=160), make_side)
    query = torch.randn(2, 4, 1, 64).to(F16)
    expected = products(keys, query)
    found = scored(replace(keys, slots=bounded(keys, 70)), values, query, bound=70)
    assert error(found[:, :, :70], expected[:, :, :70]) <= BARS[F16]
    assert found[:, :, 70:].isnan().all()


def scored(keys: SideSegments, values: SideSegments, query: torch.Tensor, bound: int | None) -> torch.Tensor:
    """Logits `[B, H, capacity, rows]` in units of log 2, from the kernels."""
    inputs, _ = launch.attend_inputs(query, keys, values, None, 32)
    calls, mapped = launch.query_calls(query, keys, inputs, scaling=0.125, bounded=bound is not None)
    for kernel, grid, arguments in calls:
        kernel[grid](**arguments)
    assert calls[1][0] is scores.scores_kernel
    return mapped["p_scores"].sum(0) * mapped["p_rows"][:, :, None, :, 0]


def products(keys: SideSegments, query: torch.Tensor) -> torch.Tensor:
    decoded = keys.codec.decode(keys.store.read(0, keys.packed), keys.rope(0, keys.packed)).float()
    rows = query.float().unflatten(1, (2, -1)).flatten(2, 3)
    return torch.einsum("bhtd,bhrd->bhtr", decoded, rows) * (0.125 * LOG2E.value)


CASES = {
    "many tiles": Case(books(), packed=160, block=16, split=(48, 4)),
    "masks": Case(books(key_shape=(4, 64)), groups=2, count=3, mask="bool", hidden=44, packed=97, split=(64, 2)),
    "masks that differ": Case(books(groups=2), count=2, mask="float", rows_differ=True, packed=97, split=(64, 2)),
    "masks per head": Case(books(), count=2, mask="per head", hidden=44),
    "with a cap and a sink logit": Case(books(), softcap=5.0, s_aux=True),
    "values by sums": Case(books(key_shape=(7, 64)), books(value_shape=(7, 64)), groups=4, count=2, head_dim=128),
    "nothing packed": Case(books(), packed=0, split=(16, 0)),
    "one packed": Case(books(), packed=1, split=(16, 1)),
}


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_plain_attention(
    name: str, dtype: torch.dtype, make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(CASES[name], dtype=dtype)
    torch.manual_seed(len(name))
    keys, values = segments(case, make_side)
    monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(case.block, 4, 2))
    monkeypatch.setattr(launch, "split_sizes", lambda *_: case.split)
    assert attention_error(launch.attend, case, keys, values) <= BARS[dtype]
    ((_, plan),) = keys.codec.kernel_side.plans.items()
    assert plan.launches[1].kernel is scores.scores_kernel
    assert plan.launches[2].constant["SCORE"] is load_scores


@pytest.mark.usefixtures("small_tiles")
def test_attention_with_a_fixed_capacity(make_side: MakeSide) -> None:
    case = Case(books(), books(value_shape=(7, 64)), dtype=F16, packed=160)
    sides = segments(case, make_side)
    slots = bounded(sides[0], 70)
    query = torch.randn(2, 6, 1, 64).to(F16)
    out = launch.attend(AttentionCall.of(query, scaling=0.125), *(replace(side, slots=slots) for side in sides))
    shown = [replace(side, packed=70, slots=None) for side in sides]
    assert error(out, plain_attention(query, *shown, None, case, None)) <= BARS[F16]


def test_plans_follow_the_capacity(make_side: MakeSide) -> None:
    """Scores lie in memory as far apart as keys, so a store that grows needs another plan."""
    keys, values = segments(Case(books(), dtype=F16), make_side)
    query = torch.randn(2, 6, 1, 64).to(F16)
    shapes = []
    for _ in range(2):
        launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
        plan = next(reversed(keys.codec.kernel_side.plans.values()))
        shapes.append(plan.scratch["p_scores"])
        keys.store._grow(keys.store.capacity + 32)
    capacity = keys.store.capacity - 64
    assert shapes == [((1, 2, 2, room, 3), F32) for room in (capacity, capacity + 32)]
