"""The attention kernel and its merge against plain attention over decoded tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.attention_cases import (
    BARS,
    BF16,
    CASES,
    F16,
    F32,
    Case,
    check_attention,
    error,
    plain_attention,
    segments,
)
from support.kernels.device import INTERPRETED
from support.ptx import inline
from triton.runtime.interpreter import InterpreterBuilder

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.eras import Era
from kvcache_compress.storage.shared.slots import Slots
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.common import plan


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_plain_attention(
    name: str, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float16 uses the fast path's assembly, as on a GPU; `ptx/inline.py` runs it in the interpreter."""
    case, texts = CASES[name], []

    def create(builder: Any, text: str, *arguments: Any) -> Any:
        texts.append(text)
        return inline.create_inline_asm(builder, text, *arguments)

    if INTERPRETED and case.dtype == F16:
        monkeypatch.setattr(plan, "PORTABLE", False)
        monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create)
    if case.block:
        monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(case.block, case.warps, 2))
        monkeypatch.setattr(launch, "split_sizes", lambda *_: case.split)
    torch.manual_seed(len(name))
    check_attention(launch.attend, case, *segments(case, make_side))
    if INTERPRETED and name.endswith("-128-float16"):
        assert bool(texts) == (case.keys[0] != "commvq"), "rows of codebooks need no assembly"


def test_rows_without_visible_tokens_are_zero(make_side: Callable[..., View]) -> None:
    keys, values = segments(Case(), make_side)
    query = torch.randn(2, 6, 1, 64)
    mask = torch.ones(2, 1, 1, keys.shape[2], dtype=torch.bool)
    mask[1] = False
    out = launch.attend(AttentionCall.of(query, mask, scaling=0.125), keys, values)
    assert out[0].abs().sum() > 0
    assert (out[1] == 0).all()


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_queries_of_any_range_fit_16_bit_operands(scale: float, make_side: Callable[..., View]) -> None:
    case = Case(dtype=BF16)
    keys, values = segments(case, make_side)
    query = (torch.randn(2, 6, 1, 64) * scale).to(BF16)
    out = launch.attend(AttentionCall.of(query, scaling=0.125 / scale), keys, values)
    unscaled = launch.attend(AttentionCall.of((query / scale).to(BF16), scaling=0.125), keys, values)
    assert out.isfinite().all()
    assert error(out, unscaled) <= 1e-2


@pytest.mark.parametrize("eras", [(), (32, 48)])
def test_fewer_tokens_than_stored(eras: tuple[int, ...], make_side: Callable[..., View]) -> None:
    """A view of an earlier step sees only its own tokens, even after more were appended."""
    keys, values = segments(Case(eras=eras), make_side)
    query = torch.randn(2, 6, 1, 64)
    before = [replace(side, packed=40) for side in (keys, values)]
    out = launch.attend(AttentionCall.of(query, scaling=0.125), *before)
    assert error(out, plain_attention(query, *before, None, Case(), None)) <= BARS[F32]


def test_what_eras_share_follows_them(make_side: Callable[..., View]) -> None:
    """Copies share their newest era, but attend with their own older ones; those keep no operands."""
    keys, values = segments(Case(packed=96, eras=(32,)), make_side)
    other, query = make_side(*Case().keys, "keys", 64, 96, outlier=5).codec, torch.randn(2, 6, 1, 64)
    twin = replace(keys, eras=(Era(0, other), keys.eras[1]))
    for view in (keys, twin, keys):
        out = launch.attend(AttentionCall.of(query, scaling=0.125), view, values)
        assert error(out, plain_attention(query, view, values, None, Case(), None)) <= BARS[F32]
        assert "kernel_side" not in vars(view.eras[0].codec)
    held, newest = keys.codec.constant_bytes(), replace(keys, eras=(*keys.eras, Era(64, other)))
    launch.attend(AttentionCall.of(query, scaling=0.125), newest, values)
    assert keys.codec.constant_bytes() < held


def test_result_does_not_depend_on_splits(make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = segments(Case(packed=96), make_side)
    query = torch.randn(2, 6, 1, 64)
    whole = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
    for split in ((16, 6), (19, 6), (96, 3)):
        monkeypatch.setattr(launch, "split_sizes", lambda *_, split=split: split)
        keys.codec.kernel_side.sizes.clear()
        torch.testing.assert_close(launch.attend(AttentionCall.of(query, scaling=0.125), keys, values), whole)


def test_all_programs_share_the_tokens_of_a_fixed_capacity(make_side: Callable[..., View]) -> None:
    """Splits follow the number of packed tokens in memory: half full, each of five has one of five tiles."""
    keys, values = segments(Case(packed=160), make_side)
    sinks, tail = keys.sinks.shape[2], keys.tail_tokens
    slots = Slots(sinks, 160, tail, sinks + 160 + tail, torch.tensor(sinks + 80 + tail), torch.tensor(80))
    keys, values = (replace(side, slots=slots) for side in (keys, values))
    query = torch.randn(2, 6, 1, 64)
    sizes = launch.Sizes(32, 5, False, launch.Tile(16, 4, 2))
    inputs, kind = launch.attend_inputs(query, keys, values, None, slots.packed, sizes.split_tokens)
    side, out = keys.codec.kernel_side, torch.empty(2, 1, 6, 64)
    call = AttentionCall.of(query, scaling=0.125)
    calls = launch.attention_calls(call, query, side, keys, values, inputs, kind, sizes, out)
    for kernel, grid, arguments in calls[:-1]:
        kernel[grid](**arguments)
    assert arguments["p_stats"][:, :, :5, :, 0].isfinite().all()
