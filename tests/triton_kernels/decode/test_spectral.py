"""Attention with spectral keys in Triton: rotary pairs, ranges, static slots and statistics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels.attention_cases import (
    BARS,
    F16,
    Case,
    check_attention,
    error,
    plain_attention,
    segments,
    spectral,
    tq,
)
from support.kernels.segment_makers import make_side
from support.method_cases import neighbour_layout

from kvcache_compress.backends import torch as reference
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.shared.slots import Slots, slot_rows
from kvcache_compress.triton_kernels.attention import launch


@pytest.mark.parametrize("rotary", [4, 20])
def test_pairs_of_neighbours_of_which_some_rotate(rotary: int) -> None:
    torch.manual_seed(rotary)
    layout = neighbour_layout(64, rotary)
    case = Case(spectral(2), tq(2), packed=96, split=(96, 1))
    keys = make_side(*case.keys, "keys", 64, case.packed, layout=layout)
    check_attention(launch.attend, case, keys, make_side(*case.values, "values", 64, case.packed))


@pytest.mark.parametrize("scales", [(2.0**-10,), (2.0**10,), (2.0**10, 2.0**4), (2.0**-15, 2.0**-10)])
def test_keys_of_any_range_fit_16_bit_operands(scales: tuple[float, ...]) -> None:
    """Bases, and means a hundred times as long as the rest of the keys, in units in which float16 overflows."""
    case = Case(spectral(3), tq(3), packed=96, eras=(32,)[: len(scales) - 1], split=(96, 1), dtype=F16)
    torch.manual_seed(0)
    keys, values = segments(case)
    for scale, era in zip(scales, keys.eras, strict=True):
        codec: Any = era.codec
        codec.lengths = scale * codec.lengths
        codec.means, codec.places = scale * codec.means.float(), 100 * codec.places.float()
    query = torch.randn(2, 6, 1, 64).to(F16)
    call = {"scaling": 0.01 / max(scales), "softcap": None, "s_aux": None}
    out = launch.attend(AttentionCall.of(query, **call), keys, values)
    assert error(out, reference.attend(AttentionCall.of(query.float(), **call), keys, values)) <= 2 * BARS[F16]


def test_queries_may_be_denormal() -> None:
    case = Case(spectral(2), tq(2), packed=96, split=(96, 1))
    torch.manual_seed(0)
    keys, values = segments(case)
    call = AttentionCall.of(1e-40 * torch.randn(2, 6, 1, 64), scaling=0.1, softcap=None, s_aux=None)
    assert error(launch.attend(call, keys, values), reference.attend(call, keys, values)) <= BARS[torch.float32]


def test_static_slots_beyond_the_packed_ones_are_not_read() -> None:
    """Only groups that a static layer's counter names are read; codes and anchors of others are poison here."""
    torch.manual_seed(0)
    case = Case(spectral(2), tq(2), groups=4, packed=160)
    keys, values = segments(case)
    assert keys.track is not None
    keys.track.buffer[:, 3:] = torch.nan
    sinks, tail = keys.sinks.shape[2], keys.tail_tokens
    rows = slot_rows(2, sinks, sinks + 96 + tail, 96)
    slots = Slots(sinks, 160, tail, sinks + 160 + tail, rows)
    full = [replace(side, slots=slots) for side in (keys, values)]
    part = [replace(side, packed=96) for side in (keys, values)]
    query = torch.randn(2, 8, 1, 64)
    out = launch.attend(AttentionCall.of(query, scaling=0.125), *full)
    # Tokens of the tail lie in slot `token % capacity`.
    order = (torch.arange(96, 96 + tail) % tail).argsort()
    rolled = [replace(side, tail_buffer=side.tail_buffer[:, :, :tail][:, :, order.argsort()]) for side in part]
    assert error(out, plain_attention(query, *rolled, None, Case(), None)) <= BARS[torch.float32]
