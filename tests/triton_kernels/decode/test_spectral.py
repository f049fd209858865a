"""Attention with spectral keys in Triton: groups, rows and head dimensions, against the reference."""

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
    NONE,
    Case,
    error,
    kivi,
    make_mask,
    plain_attention,
    segments,
    tq,
)
from support.device import INTERPRETED
from support.ptx import inline
from support.spectral_files import statistics_file
from triton.runtime.interpreter import InterpreterBuilder

from kvcache_compress.backends import torch as reference
from kvcache_compress.codecs.base import Codec
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.slots import Slots
from kvcache_compress.storage.view import View
from kvcache_compress.triton_kernels.attention import launch
from kvcache_compress.triton_kernels.common import plan


def spectral(bits: float, group: int = 32) -> tuple[str, Callable[[int], dict[str, Any]]]:
    return "spectral", lambda head_dim: {"bits": bits, "statistics": statistics_file(head_dim, group)}


# Splits begin within groups, too.
CASES = {
    "one-query": Case(spectral(3), tq(3), groups=1, packed=160, split=(96, 2)),
    "two": Case(spectral(2), tq(2), groups=2, packed=160, split=(32, 5)),
    "four": Case(spectral(2, 64), tq(2), groups=4, packed=192, split=(96, 2)),
    "seven": Case(spectral(1.25), kivi(2), groups=7, packed=96, split=(96, 1), block=16),
    "eight": Case(spectral(4), NONE, groups=8, packed=96, split=(64, 2)),
    "sixteen": Case(spectral(2.5), tq(2), groups=16, packed=64),
    "more-rows-than-a-tile": Case(spectral(2), tq(2), groups=7, count=5, mask="bool", packed=64),
    "group-of-128": Case(spectral(3, 128), tq(3), groups=4, packed=256, split=(160, 2)),
    "empty-splits": Case(spectral(2), tq(2), packed=32, split=(32, 3), mask="bool"),
    "nothing-packed": Case(spectral(2), tq(2), packed=0, split=(32, 0)),
    "softcap": Case(spectral(2), tq(2), packed=96, split=(96, 1), softcap=5.0),
    "s-aux": Case(spectral(2), tq(2), packed=96, split=(96, 1), s_aux=True),
    "padding": Case(spectral(2), tq(2), packed=96, split=(96, 1), count=2, mask="bool", hidden=70, rows_differ=True),
    "additive": Case(spectral(2), tq(2), packed=96, split=(96, 1), mask="float", hidden=70),
    "additive-per-head": Case(spectral(2), tq(2), packed=96, split=(96, 1), count=2, mask="per head", hidden=70),
    "float16": Case(spectral(3), tq(3), packed=96, split=(96, 1), dtype=F16),
    "bfloat16-112": Case(spectral(2), tq(2), groups=4, head_dim=112, packed=96, split=(96, 1), dtype=BF16),
    "as-launched": Case(spectral(2), tq(2), groups=4, packed=320, block=0, dtype=BF16),
    "256": Case(spectral(2), tq(1), head_dim=256, packed=64),
}
FAST = {
    f"{bits}-bit-{head_dim}": Case(
        spectral(bits), tq(2), groups=4, head_dim=head_dim, packed=96, split=(96, 1), dtype=F16
    )
    for bits in (0.5, 1, 2, 3, 4)
    for head_dim in (64, 128)
}
FAST |= {
    f"{head_dim}": Case(spectral(2), tq(2), groups=8, head_dim=head_dim, packed=64, dtype=F16)
    for head_dim in (80, 96, 112)
}


def check(case: Case, keys: View, values: View, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = case.groups * keys.sinks.shape[1]
    query = torch.randn(2, heads, case.count, case.head_dim).to(case.dtype)
    mask = make_mask(case, 2, heads, keys.shape[2])
    s_aux = torch.randn(heads) if case.s_aux else None
    if case.block:
        monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(case.block, 4 if case.groups > 6 else 1, 2))
        monkeypatch.setattr(launch, "split_sizes", lambda *_: case.split)
    call = {"scaling": case.head_dim**-0.5, "softcap": case.softcap, "s_aux": s_aux}
    out = launch.attend(AttentionCall.of(query, mask, **call), keys, values)
    assert out.isfinite().all()
    assert error(out, plain_attention(query, keys, values, mask, case, s_aux)) <= BARS[case.dtype]
    if case.packed:
        assert (
            error(out, reference.attend(AttentionCall.of(query.float(), mask, **call), keys, values))
            <= BARS[case.dtype]
        )


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference_and_plain_attention(
    name: str, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(len(name))
    check(CASES[name], *segments(CASES[name], make_side), monkeypatch)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs it in all tests of 16 bits")
@pytest.mark.parametrize("name", FAST)
def test_fast_path(name: str, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch) -> None:
    """The assembly in Triton's interpreter, run by `ptx/inline.py`."""
    monkeypatch.setattr(plan, "PORTABLE", False)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", inline.create_inline_asm)
    torch.manual_seed(len(name))
    check(FAST[name], *segments(FAST[name], make_side), monkeypatch)


@pytest.mark.parametrize("rotary", [4, 20, 32])
def test_partial_rotary_in_any_order(
    rotary: int, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that rotate the first channels alone, neighbours as pairs."""
    torch.manual_seed(rotary)
    rest = tuple(range(2 * rotary, 64))
    half = len(rest) // 2
    order = (*range(0, 2 * rotary, 2), *rest[:half], *range(1, 2 * rotary, 2), *rest[half:])
    layout = RopeLayout(order, rotary, tuple(range(rotary)))
    case = Case(spectral(2), tq(2), packed=96, split=(96, 1))
    keys = make_side(*case.keys, "keys", 64, case.packed, layout=layout)
    check(case, keys, make_side(*case.values, "values", 64, case.packed), monkeypatch)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
def test_keys_of_any_range_fit_16_bit_operands(
    scale: float, make_side: Callable[..., View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases, and means a hundred times as long as the rest of the keys, in units in which float16 overflows."""
    case = Case(spectral(3), tq(3), packed=96, split=(96, 1), dtype=F16)
    torch.manual_seed(0)
    keys, values = segments(case, make_side)
    codec: Any = keys.codec
    codec.inverse = scale * codec.inverse
    codec.means, codec.places = scale * codec.means, 100 * codec.places
    query = torch.randn(2, 6, 1, 64).to(F16)
    call = {"scaling": 0.01 / scale, "softcap": None, "s_aux": None}
    out = launch.attend(AttentionCall.of(query, **call), keys, values)
    assert error(out, reference.attend(AttentionCall.of(query.float(), **call), keys, values)) <= 2 * BARS[F16]


def test_static_slots_beyond_the_packed_ones_are_not_read(make_side: Callable[..., View]) -> None:
    """Only groups that a static layer's counter names are read; codes and anchors of others are poison here."""
    torch.manual_seed(0)
    case = Case(spectral(2), tq(2), groups=4, packed=160)
    keys, values = segments(case, make_side)
    assert keys.track is not None
    keys.track.buffer[:, 3:] = torch.nan
    sinks, tail = keys.sinks.shape[2], keys.tail_tokens
    counts = torch.tensor(sinks + 96 + tail), torch.tensor(96)
    slots = Slots(sinks, 160, tail, sinks + 160 + tail, *counts)
    full = [replace(side, slots=slots) for side in (keys, values)]
    part = [replace(side, packed=96) for side in (keys, values)]
    query = torch.randn(2, 8, 1, 64)
    out = launch.attend(AttentionCall.of(query, scaling=0.125), *full)
    # Tokens of the tail lie in slot `token % capacity`.
    order = (torch.arange(96, 96 + tail) % tail).argsort()
    rolled = [replace(side, tail_buffer=side.tail_buffer[:, :, :tail][:, :, order.argsort()]) for side in part]
    assert error(out, plain_attention(query, *rolled, None, Case(), None)) <= BARS[torch.float32]


def test_tables_are_those_of_the_statistics(make_codec: Callable[..., Codec]) -> None:
    """Statistics of a prompt arrive after the codec is made, and other ones may replace them."""
    codec = make_codec("spectral", {"bits": 2, "statistics": "prefill", "group": 32}, "keys", 64)
    sides = []
    for seed in range(2):
        torch.manual_seed(seed)
        codec.prepare(torch.randn(2, 2, 128, 64))
        sides.append(codec.kernel_side)
    assert sides[0] is not None
    assert sides[1] is not None
    assert sides[0].group == codec.group
    assert not torch.equal(sides[0].tables[0], sides[1].tables[0])
