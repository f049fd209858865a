"""Prompt chunks with a static capacity: tile by tile over written tokens only, with masks trimmed to match."""

import copy
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.closeness import assert_close_but_for_flips
from support.kernels.attention_cases import attended
from support.oracle import label
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import interface as attention
from kvcache_compress.backends import tiled
from kvcache_compress.backends.tiled import TILED
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.storage.side import MAX_DECODE_TOKENS
from kvcache_compress.storage.view import PathTaken, View, record_paths

TILE, CAPACITY = 32, 235
SIZES = [100, 20, 1, 40, 16, 33]
"""Sizes of a prompt, chunks and steps."""
TURBOQUANT: dict[str, Any] = {"keys": "turboquant", "values": "turboquant", "sink_tokens": 4, "recent_tokens": 8}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "TILE_TOKENS", TILE)


@pytest.fixture
def model(tiny_model: Any) -> Any:
    """A new model for each test, with fused attention on."""
    own = type(tiny_model)(copy.deepcopy(tiny_model.config)).eval()
    own.load_state_dict(tiny_model.state_dict())
    enable_fused_attention(own)
    return own


def chunks(taken: list[PathTaken], prompt: int | None = None) -> list[str]:
    """The paths of chunks; steps are left out, and a prompt of so many tokens."""
    return [path for path, queries in taken if queries > MAX_DECODE_TOKENS and queries != prompt]


@pytest.mark.parametrize("case", [("turboquant-4", True), ("no-statistics", True)], indirect=True, ids=label)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_equal_in_all_caches(case: Any, ids: torch.Tensor, backend: str) -> None:
    """Chunks of a left-padded batch equal the growing cache's and the oracle's, by tiles and in C++."""
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    caches = [case.cache(max_cache_len=capacity, backend=backend) for capacity in (None, CAPACITY)]
    with record_paths() as taken:
        growing, static = (case.feed(one, ids[:, : sum(SIZES)], SIZES, mask)[:, 11:] for one in caches)
    assert {*chunks(taken, SIZES[0])} == {"tiled" if backend == "torch" else "cpp"}
    assert_close_but_for_flips(static, growing)
    assert_close_but_for_flips(static, case.feed(case.oracle(), ids[:, : sum(SIZES)], SIZES, mask)[:, 11:])
    assert caches[0].packed_tokens == caches[1].packed_tokens > 2 * TILE


@pytest.mark.parametrize(("kind", "dtype"), [("sdpa", torch.float32), ("eager", torch.bfloat16)])
def test_masks_of_each_kind(model: Any, ids: torch.Tensor, kind: str, dtype: torch.dtype) -> None:
    """Boolean and additive masks give equal results, by the same arithmetic in the same order."""
    disable_fused_attention(model)
    model.to(dtype).set_attn_implementation(kind)
    enable_fused_attention(model)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    results = []
    for capacity in (None, CAPACITY):
        cache = CompressedCache(model.config, {**TURBOQUANT, "max_cache_len": capacity, "backend": "torch"})
        parts = []
        for start, stop in ((0, 150), (150, 180), (180, 230)):
            with torch.no_grad(), record_paths() as taken:
                output = model(ids[:, start:stop], attention_mask=mask[:, :stop], **with_cache(cache))
            assert {*chunks(taken, 150)} == ({"tiled"} if start else set())
            parts.append(output.logits[:, 11 if start == 0 else 0 :])
        results.append(torch.cat(parts, 1))
        assert cache.packed_tokens > 2 * TILE
    assert_close_but_for_flips(*(x.float() for x in results))


class _Largest(TorchDispatchMode):
    """Mode that records the bytes of the largest new tensor of any operator; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))]
        made = [x.untyped_storage() for x in _tensors(result)]
        self.bytes = max([self.bytes, *(x.nbytes() for x in made if x.data_ptr() not in given)])
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("capacity", "fused"), [(2048, True), (2048, False), (None, True)])
def test_a_chunk_takes_memory_for_a_tile(model: Any, capacity: int | None, fused: bool) -> None:
    """No operator of a tiled chunk allocates a quarter of a decoded layer; the control, decoding, allocates all."""
    batch, heads, count = 2, 2, 24
    if not fused:
        disable_fused_attention(model)
    cache = CompressedCache(model.config, {**TURBOQUANT, "max_cache_len": capacity, "backend": "torch"})
    states = torch.randn(batch, heads, 1500 + count, 32)
    cache.update(*(states[:, :, :1500],) * 2, 1)
    assert cache.packed_tokens > 1400
    query = torch.randn(batch, 6, count, 32)
    mask = torch.zeros(batch, 1, count, capacity or 1500 + count, dtype=torch.bool)
    mask[..., : 1500 + count] = torch.ones(count, 1500 + count, dtype=torch.bool).tril(1500)
    with torch.no_grad(), _Largest() as largest:
        keys, values = cache.update(*(states[:, :, 1500:],) * 2, 1)
        attention.attention_forward(model.model.layers[1].self_attn, query, keys, values, mask)
    layer = batch * heads * 1500 * 32 * 4
    assert largest.bytes < layer / 4 if fused else largest.bytes > layer


@pytest.mark.parametrize("packed", [True, False])
def test_foreign_code_and_attention_with_nothing_packed(model: Any, packed: bool) -> None:
    """Foreign code gets keys as long as the mask; the model's own attention gets written tokens and a trimmed mask."""
    layer = CompressedCache(model.config, {**TURBOQUANT, "recent_tokens": 8 if packed else 64, "max_cache_len": 100})
    layer = layer.layers[1]
    states = torch.randn(2, 2, 70, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :50], states[:, :, :50])
    keys, values = layer.update(states[:, :, 50:], states[:, :, 50:])
    assert isinstance(keys, View)
    assert (keys.packed > 0) == packed
    assert keys.shape == keys.dense().shape == (2, 2, 100, 32)
    assert layer.get_mask_sizes(20) == (keys.shape[2], 0)
    assert keys[:, :, 70:].eq(0).all()
    whole = torch.zeros(2, 1, 20, 100, dtype=torch.bool)
    whole[..., :70] = torch.ones(20, 70, dtype=torch.bool).tril(50)
    there = keys.stored()
    assert there.shape[2] == keys.over_tokens(Mask(whole)).tensor.shape[3] == 70
    assert torch.equal(torch.cat([there, keys[:, :, 70:]], 2), keys.dense())
    query = torch.randn(2, 6, 20, 32, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys.dense(), values.dense(), whole, scale=0.2, enable_gqa=True
    )
    module = model.model.layers[1].self_attn
    got, _ = attention.attention_forward(module, query, keys, values, whole, scaling=0.2)
    torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [None, 100, 120])
def test_padding_masks_of_flash_attention(model: Any, width: int | None) -> None:
    """Padding masks `[B, T]` work for the tokens so far and for the whole capacity, as `generate` makes them."""
    layer = CompressedCache(model.config, {**TURBOQUANT, "max_cache_len": 120, "backend": "torch"}).layers[1]
    states = torch.randn(2, 2, 100, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :80], states[:, :, :80])
    views = layer.update(states[:, :, 80:], states[:, :, 80:])
    padding = torch.ones(2, 120, dtype=torch.long)
    padding[1, :9] = width is None
    whole = torch.zeros(2, 1, 20, 120, dtype=torch.bool)
    whole[..., :100] = torch.ones(20, 100, dtype=torch.bool).tril(80) & padding[:, None, None, :100].bool()
    query = torch.randn(2, 6, 20, 32, generator=torch.Generator().manual_seed(1))
    assert views[0].path(AttentionCall.of(query, scaling=1.0), views[1]) is TILED
    mask = None if width is None else padding[:, :width]
    got, expected = (attended(views, AttentionCall.of(query, one, scaling=0.2)) for one in (mask, whole))
    torch.testing.assert_close(got, expected)


def test_chunked_prefill_of_generate(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids[:, :200])
    mask[1, :11] = 0
    results = []
    for capacity in (None, CAPACITY):
        cache = CompressedCache(model.config, {**TURBOQUANT, "max_cache_len": capacity, "backend": "torch"})
        how = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask, "prefill_chunk_size": 50}
        with record_paths() as taken:
            results.append(model.generate(ids[:, :200], **with_cache(cache), **how))
        paths = chunks(taken)
        assert {*paths[6:]} == {"tiled"}, "all but the first calls, which find no more than a tile packed"
        assert cache.packed_tokens > TILE
    assert torch.equal(*results)
