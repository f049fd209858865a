"""Keys and values in the hands of others: views in place of tensors."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from kvcache_compress import enable_fused_attention
from kvcache_compress.storage.view import View


@pytest.fixture
def views(unfused: Any, ids: torch.Tensor) -> tuple[View, View, torch.Tensor, torch.Tensor]:
    """Keys and values of layer 1 as a decode step gets them, and the step's dense tensors."""
    enable_fused_attention(unfused.model)
    cache = unfused.cache()
    with torch.no_grad():
        unfused.feed(cache, ids[:, :70], [65, 5])
    fresh = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(1))
    keys, values = copy.deepcopy(cache).update(fresh, -fresh, 1)
    cache.update(fresh, -fresh, 1)
    assert isinstance(keys, View)
    assert isinstance(values, View)
    assert keys.packed > 0
    return keys, values, cache.layers[1].keys, cache.layers[1].values


def test_reports_the_logical_tensor(views: Any) -> None:
    for view, dense in (views[::2], views[1::2]):
        assert view.shape == dense.shape == (2, 2, 71, 32)
        assert view.dtype == dense.dtype
        assert view.device == dense.device
        assert view.ndim == view.dim() == 4
        assert view.size(2) == 71
        assert len(view) == 2
        assert "packed=32" in repr(view)


def test_hides_no_method_of_a_tensor(views: Any) -> None:
    """Only these names mean for a view what they mean for a tensor; all others of a tensor decode it."""
    own = {name for name in dir(View) if not name.startswith("_")}
    assert own & set(dir(torch.Tensor)) == {"shape", "dtype", "device", "ndim", "to"}
    with mock.patch.object(View, "dense") as decoded, pytest.raises(AttributeError, match="segments"):
        views[0].segments  # noqa: B018
    assert not decoded.called


def test_decodes_for_foreign_code(views: Any) -> None:
    for view, dense in (views[::2], views[1::2]):
        assert torch.equal(view.dense(), dense)
        assert torch.equal(torch.softmax(view, dim=-1), dense.softmax(-1))
        assert torch.equal(torch.cat([view, dense], dim=2), torch.cat([dense, dense], 2))
        assert torch.equal(torch.cat([dense, view], dim=2), torch.cat([dense, dense], 2))
        assert torch.equal(view.transpose(2, 3), dense.mT)
        assert torch.equal(view[:, :, -1:], dense[:, :, -1:])
        assert torch.equal(view[..., dense[0, 0, 0] > 0], dense[..., dense[0, 0, 0] > 0])
        assert torch.equal(view[:, :, None].expand(2, 2, 3, 71, 32), dense[:, :, None].expand(2, 2, 3, 71, 32))
        assert torch.equal(dense + view, dense + dense)
        assert torch.equal(1 - view, 1 - dense)
        assert torch.equal(view > 0, dense > 0)
        assert torch.equal(dense @ view.mT, dense @ dense.mT)
        assert all(torch.equal(*both) for both in zip(view, dense, strict=True))
    keys, values, k, v = views
    query = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(query, keys, values), attend(query, k, v))


@pytest.fixture
def filled(unfused: Any, ids: torch.Tensor, capacity: int | None) -> Any:
    """A cache of each kind after a prompt and steps, with fused attention on."""
    enable_fused_attention(unfused.model)
    cache = unfused.cache(max_cache_len=capacity)
    with torch.no_grad():
        unfused.feed(cache, ids[:, :62], [60, 1, 1])
    return cache


def update(cache: Any, count: int, seed: int) -> list[View]:
    """Give every layer `count` new tokens, and return the handles of the compressed ones."""
    keys, values = torch.randn(2, 2, 2, count, 32, generator=torch.Generator().manual_seed(seed))
    found = [handle for index in range(3) for handle in cache.update(keys, values, index)]
    return [handle for handle in found if isinstance(handle, View)]


def crop_and_go_on(cache: Any, tokens: int, *following: int) -> None:
    cache.crop(-tokens)
    for count in following:
        update(cache, count, 20 + count)


CHANGES: dict[str, Callable[[Any], object]] = {
    "steps": lambda cache: [update(cache, 2, seed) for seed in range(20)],
    "chunk": lambda cache: update(cache, 40, 3),
    "crop in the tail": lambda cache: crop_and_go_on(cache, 3, 1, 1, 1),
    "crop in the packed part": lambda cache: crop_and_go_on(cache, 50),
    "crop in the packed part, steps": lambda cache: crop_and_go_on(cache, 50, *[16] * 4),
    "crop to nothing, chunk": lambda cache: crop_and_go_on(cache, 200, 60),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset, chunk": lambda cache: (cache.reset(), update(cache, 60, 4)),
    "move": lambda cache: (cache.layers[1].offload(), cache.layers[1].prefetch(), update(cache, 1, 6)),
}


@pytest.mark.parametrize("count", [1, 20])
def test_held_views_stay_what_they_are(filled: Any, count: int) -> None:
    for name, change in CHANGES.items():
        cache = copy.deepcopy(filled)
        held = update(cache, count, 5)
        before = [handle.dense().clone() for handle in held]
        assert all(handle.packed > 0 for handle in held)
        change(cache)
        for handle, dense in zip(held, before, strict=True):
            assert torch.equal(handle.dense(), dense), name
        if name in ("steps", "move", "reorder"):
            crop_and_go_on(cache, 60, *[16] * 4)
            for handle, dense in zip(held, before, strict=True):
                assert torch.equal(handle.dense(), dense), f"{name}, crop"


def test_views_that_nobody_holds_cost_nothing(filled: Any) -> None:
    gone = [weakref.ref(handle) for handle in update(filled, 1, 5)]
    gc.disable()
    try:
        assert not any(view() for view in gone)
    finally:
        gc.enable()
    with mock.patch.object(View, "release") as released:
        update(filled, 1, 6)
        filled.crop(-50)
        for count in (40, 1, 1):
            update(filled, count, 7)
    assert not released.called
    assert all(len(layer.handed_out._views) == 2 for layer in filled.compressed_layers.values())
    assert filled.packed_tokens > 0
