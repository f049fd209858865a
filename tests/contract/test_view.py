"""`PackedKV`, the handle that `update()` returns while fused attention is on, works in place of a tensor."""

import copy
from typing import Any

import pytest
import torch

from kvcache_compress import enable_fused_attention
from kvcache_compress.attention.handle import PackedKV


@pytest.fixture
def views(unfused: Any, ids: torch.Tensor) -> tuple[PackedKV, PackedKV, torch.Tensor, torch.Tensor]:
    """Keys and values of layer 1 as a decode step gets them, and the step's dense tensors."""
    enable_fused_attention(unfused.model)
    cache = unfused.cache()
    with torch.no_grad():
        unfused.feed(cache, ids[:, :70], [65, 5])
    fresh = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(1))
    keys, values = copy.deepcopy(cache).update(fresh, -fresh, 1)
    cache.update(fresh, -fresh, 1)
    assert isinstance(keys, PackedKV)
    assert isinstance(values, PackedKV)
    assert keys.step.packed > 0
    return keys, values, cache.layers[1].keys, cache.layers[1].values


def test_reports_the_logical_tensor(views: Any) -> None:
    for view, dense in (views[::2], views[1::2]):
        assert view.shape == dense.shape == (2, 2, 71, 32)
        assert view.dtype == dense.dtype
        assert view.device == dense.device
        assert view.ndim == view.dim() == 4
        assert view.size(2) == 71
        assert "packed=32" in repr(view)


def test_decodes_for_foreign_code(views: Any) -> None:
    """A handle decodes for torch functions, methods, indexing, and lists that mix it with tensors."""
    for view, dense in (views[::2], views[1::2]):
        assert torch.equal(view.dense(), dense)
        assert torch.equal(torch.softmax(view, dim=-1), dense.softmax(-1))
        assert torch.equal(torch.cat([view, dense], dim=2), torch.cat([dense, dense], 2))
        assert torch.equal(torch.cat([dense, view], dim=2), torch.cat([dense, dense], 2))
        assert torch.equal(torch.stack((view, view)), torch.stack((dense, dense)))
        assert torch.equal(view.transpose(2, 3), dense.mT)
        assert torch.equal(view[:, :, -1:], dense[:, :, -1:])
        assert torch.equal(view[0, 1, 5], dense[0, 1, 5])
        assert torch.equal(view[..., dense[0, 0, 0] > 0], dense[..., dense[0, 0, 0] > 0])
        assert torch.equal(view[:, :, None].expand(2, 2, 3, 71, 32), dense[:, :, None].expand(2, 2, 3, 71, 32))
        assert torch.equal(torch.nn.functional.pad(view, (0, 1)), torch.nn.functional.pad(dense, (0, 1)))


def test_operators(views: Any) -> None:
    """Operators work with tensors and numbers on either side of a handle."""
    view, _, dense, _ = views
    query = torch.ones(2, 2, 3, 32)
    assert torch.equal(query @ view.mT, query @ dense.mT)
    assert torch.equal(dense + view, dense + dense)
    assert torch.equal(torch.matmul(query, view.transpose(-1, -2)), query @ dense.mT)
    for got, expected in (
        (torch.mul(view, 2.0), dense * 2),
        (view * 2, dense * 2),
        (2 * view, dense * 2),
        (view / 2, dense / 2),
        (view - dense, dense - dense),
        (1 - view, 1 - dense),
        (-view, -dense),
        (view @ query.mT, dense @ query.mT),
        (view + view, dense + dense),
        (view > 0, dense > 0),
        (view == 0, dense == 0),
        (view**2, dense**2),
    ):
        assert torch.equal(got, expected)
    assert len(view) == 2
    assert all(torch.equal(a, b) for a, b in zip(view, dense, strict=True))


def test_scaled_dot_product_attention(views: Any) -> None:
    keys, values, k, v = views
    query = torch.randn(2, 2, 1, 32, generator=torch.Generator().manual_seed(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(query, keys, values), attend(query, k, v))
