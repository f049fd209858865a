"""Attention of many queries over tiles of a compressed layer, and the calls that use it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.attention_cases import (
    BARS,
    BF16,
    DECLARED,
    F16,
    F32,
    Case,
    check_attention,
    error,
    kivi,
    plain_attention,
    prod,
    segments,
    tq,
)
from support.kernels.device import DEVICE
from support.kernels.segment_makers import poison  # noqa: F401

from kvcache_compress.backends import tiled
from kvcache_compress.backends import torch as reference
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.shared.slots import Slots, slot_rows

TILE = 64
"""Tokens per tile in these tests, a multiple of every group size."""
TILED_BARS = BARS | {BF16: 4e-3}
"""PyTorch's attention in bfloat16 rounds more than ours, and the result of each tile once more."""
CALLS = {
    **{name: Case(*DECLARED[name], packed=192, count=24) for name in ("commvq", "spectral-2.5", "polarquant-rope")},
    "causal": Case(packed=160, count=40),
    "causal-triangle-over-two-tiles": Case(packed=130, count=60),
    "whole-tiles": Case(packed=128, count=17),
    "no-sinks": Case(packed=160, count=40, sinks=0),
    "one-head-per-group": Case(packed=160, count=40, groups=1),
    "padding": Case(packed=160, count=40, mask="bool", hidden=100),
    "rows-that-differ": Case(packed=160, count=40, mask="bool", hidden=100, rows_differ=True),
    "additive": Case(tq(3), kivi(2), packed=160, count=40, mask="float", hidden=100, head_dim=128),
    "additive-per-head": Case(packed=160, count=40, mask="per head"),
    "s-aux": Case(prod(3), tq(2), packed=160, count=40, s_aux=True),
    "float16": Case(packed=160, count=40, dtype=F16, mask="bool", hidden=100, head_dim=80),
    "bfloat16": Case(kivi(4), kivi(2), packed=608, count=40, dtype=BF16, mask="bool", hidden=100),
    "bfloat16-s-aux": Case(packed=320, count=40, dtype=BF16, mask="float", hidden=100, s_aux=True),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_TOKENS", TILE)
    monkeypatch.setattr(tiled, "BLOCK_QUERIES", 16)


@pytest.mark.parametrize("name", CALLS)
def test_equals_plain_attention(name: str) -> None:
    torch.manual_seed(len(name))
    check_attention(tiled.attend, CALLS[name], *segments(CALLS[name]), TILED_BARS)


def test_tiles_that_a_row_does_not_see() -> None:
    """Some rows do not see the first tile or the last, and one sees none, and is zero."""
    case = Case(packed=160, count=20)
    keys, values = segments(case)
    keys.sinks.mul_(100)
    query = 30 * torch.randn(2, 6, 20, 64)
    mask = torch.ones(1, 1, 20, keys.shape[2], dtype=torch.bool)
    mask[..., :2, : TILE + 3] = False
    mask[..., 2:4, -28:] = False
    mask[..., 4, :] = False
    out = tiled.attend(AttentionCall.of(query, mask, scaling=0.125), keys, values)
    assert out[:, 4].eq(0).all()
    seen = torch.arange(20) != 4
    assert error(out[:, seen], plain_attention(query, keys, values, mask, case, None)[:, seen]) <= BARS[F32]


@pytest.mark.parametrize("least", [-2e4, torch.finfo(torch.float32).min, -torch.inf])
def test_additive_masks_of_any_size(least: float) -> None:
    """A row masked everywhere by a finite number attends to all tokens equally; by infinity, to none."""
    case = Case(packed=160, count=20)
    keys, values = segments(case)
    query = torch.randn(2, 6, 20, 64)
    mask = torch.zeros(2, 1, 20, keys.shape[2])
    mask[0, :, 3:, 100:] = least
    mask[1, :, 2] = least
    out = tiled.attend(AttentionCall.of(query, mask, scaling=0.125), keys, values)
    expected = reference.attend(AttentionCall.of(query, mask, scaling=0.125), keys, values)
    kept = torch.ones(2, 20, dtype=torch.bool)
    kept[1, 2] = False
    assert error(out[kept], expected[kept]) <= 1e-5
    assert out.isfinite().all()
    assert out[1, 2].eq(0).all() == (least == -torch.inf)
    if least == -2e4:  # beside which float32 holds nine bits of the logits' fractions; beside lower numbers, nothing
        assert error(out[1, 2], expected[1, 2]) <= 2e-3


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("torch", {"count": 16}),
        ("tiled", {"count": 17}),
        ("cpp", {"backend": "cpp", "count": 128}),
        ("tiled", {"backend": "cpp", "count": 129, "packed": TILE}),
        ("tiled", {"backend": "cpp", "count": 40, "dtype": BF16}),
        ("decode", {"packed": TILE}),
        ("cpp", {"backend": "cpp", "packed": TILE}),
        ("torch", {"packed": 0, "count": 16}),
        ("decode", {"packed": 0}),
        ("decode", {"softcap": 5.0}),
        ("decode", {"dtype": torch.float64}),
        ("decode", {"value_dim": 96}),
        ("decode", {"static": True}),
    ],
    ids=str,
)
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU takes other widths")
def test_which_calls_take_tiles(path: str, changes: dict[str, Any]) -> None:
    call = {name: x for name, x in changes.items() if name not in ("backend", "static")}
    case = Case(**{"packed": TILE + 32, "count": 17} | call)
    keys, values = segments(case)
    if "static" in changes:
        keys = replace(keys, slots=Slots(16, keys.packed, 17, 400, slot_rows(2, 16, 56, 40)))
    query = torch.zeros(2, 6, case.count, 64, dtype=case.dtype)
    keys = replace(keys, backend=BACKENDS[changes.get("backend", "torch")])
    found = keys.path(AttentionCall.of(query, scaling=1.0, softcap=case.softcap), values)
    assert ("decode" if found is None else found.name) == path


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on CPUs PyTorch has no attention for them that gives its logarithm")
def test_values_of_another_width() -> None:
    case = Case(packed=160, count=40, head_dim=96, value_dim=64, dtype=F16)
    keys, values = segments(case)
    query = torch.randn(2, 6, 40, 96).to(F16)
    out = tiled.attend(AttentionCall.of(query, scaling=96**-0.5), keys, values)
    assert error(out, plain_attention(query, keys, values, None, case, None)) <= BARS[F16]
