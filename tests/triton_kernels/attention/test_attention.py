"""The attention kernel and its merge against plain attention over decoded tokens."""

from dataclasses import replace

import pytest
import torch
from support.kernels.attention_cases import (
    BARS,
    BF16,
    CASES,
    F32,
    IN_FLOAT32,
    Case,
    check_attention,
    check_hidden_rows,
    error,
    plain_attention,
    segments,
)
from support.kernels.device import INTERPRETED
from support.kernels.pages import PAGED, over_pages
from support.kernels.segment_makers import make_side

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.adaptive.eras import Era
from kvcache_compress.storage.shared.slots import Slots, slot_rows
from kvcache_compress.triton_kernels.attention import launch


@pytest.mark.parametrize("name", [name for name in CASES if not INTERPRETED or name not in IN_FLOAT32])
def test_kernel_equals_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter on the portable path; `test_compiled.py` and `make emulate` take the fast path's assembly."""
    case = CASES[name]
    if case.block:
        monkeypatch.setattr(launch, "tile_shape", lambda *_: launch.Tile(case.block, case.warps, 2))
        monkeypatch.setattr(launch, "split_sizes", lambda *_: case.split)
    torch.manual_seed(len(name))
    check_attention(launch.attend, case, *segments(case))


@pytest.mark.parametrize(
    "name", [name for name, case in PAGED.items() if case.packed % 32 == 0 and not (INTERPRETED and name in IN_FLOAT32)]
)
def test_pages_equal_plain_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "split_sizes", lambda *_: PAGED[name].split)
    torch.manual_seed(len(name))
    check_attention(over_pages(launch.attend), PAGED[name], *segments(PAGED[name]))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_queries_of_any_range_fit_16_bit_operands(scale: float) -> None:
    case = Case(dtype=BF16)
    keys, values = segments(case)
    query = (torch.randn(2, 6, 1, 64) * scale).to(BF16)
    out = launch.attend(AttentionCall.of(query, scaling=0.125 / scale), keys, values)
    unscaled = launch.attend(AttentionCall.of((query / scale).to(BF16), scaling=0.125), keys, values)
    assert out.isfinite().all()
    assert error(out, unscaled) <= 1e-2


def test_rows_without_visible_tokens_are_zero() -> None:
    check_hidden_rows(launch.attend, *segments(Case()))


@pytest.mark.parametrize("eras", [(), (32, 48)])
def test_fewer_tokens_than_stored(eras: tuple[int, ...]) -> None:
    """A view of an earlier step sees only its own tokens, even after more were appended."""
    keys, values = segments(Case(eras=eras))
    query = torch.randn(2, 6, 1, 64)
    before = [replace(side, packed=40) for side in (keys, values)]
    out = launch.attend(AttentionCall.of(query, scaling=0.125), *before)
    assert error(out, plain_attention(query, *before, None, Case(), None)) <= BARS[F32]


def test_what_eras_share_follows_them() -> None:
    """Copies share their newest era, but attend with their own older ones; those keep no operands."""
    keys, values = segments(Case(packed=96, eras=(32,)))
    other, query = make_side(*Case().keys, "keys", 64, 96, outlier=5).codec, torch.randn(2, 6, 1, 64)
    twin = replace(keys, eras=(Era(0, other), keys.eras[1]))
    for view in (keys, twin, keys):
        out = launch.attend(AttentionCall.of(query, scaling=0.125), view, values)
        assert error(out, plain_attention(query, view, values, None, Case(), None)) <= BARS[F32]
        assert "kernel_side" not in vars(view.eras[0].codec)
    held, newest = keys.codec.constant_bytes(), replace(keys, eras=(*keys.eras, Era(64, other)))
    launch.attend(AttentionCall.of(query, scaling=0.125), newest, values)
    assert keys.codec.constant_bytes() < held


def test_all_programs_share_the_tokens_of_a_fixed_capacity() -> None:
    """Splits follow the number of packed tokens in memory: half full, each of five has one of five tiles."""
    keys, values = segments(Case(packed=160))
    sinks, tail = keys.sinks.shape[2], keys.tail_tokens
    rows = slot_rows(2, sinks, sinks + 80 + tail, 80)
    slots = Slots(sinks, 160, tail, sinks + 160 + tail, rows)
    keys, values = (replace(side, slots=slots) for side in (keys, values))
    query = torch.randn(2, 6, 1, 64)
    sizes = launch.Sizes(32, 5, False, launch.Tile(16, 4, 2))
    inputs, kind = launch.attend_inputs(query, keys, values, None, rows, sizes.split_tokens)
    side, out = keys.codec.kernel_side, torch.empty(2, 1, 6, 64)
    call = AttentionCall.of(query, scaling=0.125)
    calls = launch.attention_calls(call, query, side, keys, values, inputs, kind, sizes, out)
    for kernel, grid, arguments in calls[:-1]:
        kernel[grid](**arguments)
    assert arguments["p_stats"][:, :, :5, :, 0].isfinite().all()


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
