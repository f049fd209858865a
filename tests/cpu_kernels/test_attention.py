"""The C++ attention, and PyTorch's, against plain attention over decoded tokens."""

import copy
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from support.kernels.attention_cases import (
    BARS,
    CASES,
    F32,
    NONE,
    Case,
    check_attention,
    check_hidden_rows,
    commvq,
    error,
    kivi,
    plain_attention,
    segments,
    tq,
)
from support.kernels.pages import PAGED, over_pages
from support.kernels.segment_makers import make_side
from support.method_cases import neighbour_layout

from kvcache_compress.backends import torch as reference
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.cpu_kernels.attention import launch
from kvcache_compress.storage.view import View

pytestmark = pytest.mark.usefixtures("built")


CALLS = CASES | {
    "many-splits-of-many-tiles": Case(tq(4), tq(2), packed=3000, head_dim=128, groups=2),
    "more-rows-than-a-task": Case(tq(3), kivi(4), count=50, groups=7, packed=600, mask="bool"),
    "float64": Case(dtype=torch.float64),
    **{
        f"words-of-{rows}-rows": Case(("qjl", {"sketch_ratio": rows / dim}), tq(4), head_dim=dim, packed=33)
        for dim, rows in ((520, 2080), (576, 2128))  # more than usual
    },
    **{
        f"words-of-{width}-codes": Case(
            tq(2.5, outlier_fraction=width / 32), tq(3.5, outlier_fraction=width / 32), head_dim=32
        )
        for width in (8, 16, 24)
    },
    **{
        f"commvq-{name}": Case(commvq(**shape), commvq(**shape), count=3, mask="bool")
        for name, shape in {
            "pairs-by-themselves": {"groups": 32, "key_shape": (2, 8), "value_shape": (2, 8)},
            "two-centres": {"key_shape": (1, 2), "value_shape": (1, 2)},
            "as-calibrated": {"key_shape": (11, 64), "value_shape": (21, 64)},
        }.items()
    },
    "commvq-masked": Case(commvq(), commvq(), packed=1100, mask="bool", rows_differ=True, s_aux=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_equals_plain_attention(name: str) -> None:
    """So does the reference in torch, whose queries are in float32."""
    torch.manual_seed(len(name))
    keys, values = segments(CALLS[name])

    def as_float(call: AttentionCall, *views: View) -> torch.Tensor:
        return reference.attend(replace(call, query=call.query.float()), *views).to(call.query.dtype)

    for attend in (launch.attend, as_float):
        check_attention(attend, CALLS[name], keys, values)


@pytest.mark.parametrize("name", PAGED)
def test_pages_equal_plain_attention(name: str) -> None:
    keys, values = segments(PAGED[name])
    check_attention(over_pages(launch.attend), PAGED[name], keys, values)


def test_rows_hidden_by_the_lowest_number_are_averages() -> None:
    keys, values = segments(Case())
    query = torch.randn(2, 6, 1, 64)
    mask = torch.full((2, 1, 1, keys.shape[2]), torch.finfo(torch.float32).min)
    out = launch.attend(AttentionCall.of(query, mask, scaling=0.125), keys, values)
    torch.testing.assert_close(out, values.dense().mean(2)[:, None].repeat_interleave(3, 2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rotary", [4, 20])
def test_pairs_of_neighbours_of_which_some_rotate(rotary: int) -> None:
    """Positions differ per row."""
    keys = make_side(*commvq(), "keys", 64, 50, layout=neighbour_layout(64, rotary))
    values = make_side(*tq(4), "values", 64, 50)
    query = torch.randn(2, 6, 1, 64)
    out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
    assert error(out, plain_attention(query, keys, values, None, Case(), None)) <= BARS[F32]


def test_queries_of_any_strides() -> None:
    case = Case(count=3)
    keys, values = segments(case)
    query = torch.randn(2, 6, 3, 64)
    out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
    for strided in (query.transpose(1, 2).contiguous().transpose(1, 2), query.mT.contiguous().mT):
        assert torch.equal(launch.attend(AttentionCall.of(strided, scaling=0.125), keys, values), out)


def test_rows_without_visible_tokens_are_zero() -> None:
    check_hidden_rows(launch.attend, *segments(Case()))


def test_fewer_tokens_than_stored() -> None:
    """A view of an earlier step sees only its own tokens; with a static capacity some slots are empty."""
    keys, values = segments(Case())
    query = torch.randn(2, 6, 1, 64)
    before = [replace(side, packed=40) for side in (keys, values)]
    expected = plain_attention(query, *before, None, Case(), None)
    assert error(launch.attend(AttentionCall.of(query, scaling=0.125), *before), expected) <= BARS[F32]
    larger = [replace(side, packed=64) for side in (keys, values)]
    holds = torch.arange(larger[0].shape[2])
    mask = ((holds < 3 + 40) | (holds >= 3 + 64))[None, None, None]
    assert error(launch.attend(AttentionCall.of(query, mask, scaling=0.125), *larger), expected) <= BARS[F32]


def test_result_does_not_depend_on_threads() -> None:
    keys, values = segments(Case(packed=3000))
    query = torch.randn(2, 6, 1, 64)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(launch.attend(AttentionCall.of(query, scaling=0.125), keys, values))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[2], found[0], atol=1e-6, rtol=1e-5)


def test_sides_are_described_anew_when_a_tensor_is_replaced() -> None:
    """The description is kept while the tensors are the same, and neither outlives them nor goes along in copies."""
    keys, values = segments(Case(NONE, tq(4)))
    query = torch.randn(2, 6, 1, 64)

    def check(keys: View, values: View) -> None:
        out = launch.attend(AttentionCall.of(query, scaling=0.125), keys, values)
        assert error(out, plain_attention(query, keys, values, None, Case(), None)) <= BARS[F32]

    check(keys, values)
    kept = keys.store.described
    check(replace(keys, tail_tokens=keys.tail_tokens - 1), replace(values, tail_tokens=values.tail_tokens - 1))
    assert keys.store.described is kept is not None
    twin = copy.deepcopy(keys)
    assert twin.store.described is None
    check(twin, values)
    assert pickle.loads(pickle.dumps(kept)) is None
    for change in ({"sinks": torch.randn_like(keys.sinks)}, {"tail_buffer": torch.randn_like(keys.tail_buffer)}):
        check(replace(keys, **change), values)
    buffer = weakref.ref(values.store.buffers[0])
    fields = values.store.read(0, 32)
    values.store.append(tuple(field.clone() for field in fields), 32, growing=False)
    keys.store.append(keys.store.read(0, 32), 32, growing=False)
    del fields
    assert buffer() is None
    check(*(replace(side, packed=side.packed + 32) for side in (keys, values)))
