"""Steps of static layers and over pages: Triton's kernels against PyTorch's operators."""

import copy
import math
from typing import Any

import pytest
import torch
from support.files.spectral_files import statistics_of
from support.kernels.attention_cases import attended
from support.models.small_model import small_config, small_model

from kvcache_compress import CompressedCache
from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.bench.layers import use_backend
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.paged import PagedStorage, Request, Step
from kvcache_compress.storage.static import FULL, NOT_FINITE, StaticStorage

HEADS, GROUPS, DIM, CAPACITY = 2, 3, 32, 140
TURBOQUANT = {"method": "turboquant", "bits": 3, "codebook": "lloyd_max"}
OTHERS: list[dict[str, Any]] = [
    {"method": "kivi", "bits": 2},
    {"method": "turboquant", "bits": 2, "codebook": "trellis"},
    {"method": "polarquant_rope", "group_size": 32},
    {"method": "qjl", "scalar": "norm"},
    {"method": "polarquant_recursive"},
    {"method": "turboquant", "bits": 3, "estimator": "prod"},  # without a kernel encoder: the layer encodes
    {"method": "spectral", "bits": 2, "statistics": statistics_of(small_config(1), "one-layer")},
]


def static_layer(backend: str, keys: dict[str, Any], sinks: int, recent: int) -> CompressedLayer:
    """Layer of static capacity filled with a prompt of 50 tokens, the same in every call."""
    config = {"keys": keys, "values": TURBOQUANT, "sink_tokens": sinks, "recent_tokens": recent, "backend": "torch"}
    layer = CompressedCache(small_model(1).config, {**config, "max_cache_len": CAPACITY}).layers[0]
    prompt = torch.randn(2, HEADS, 50, DIM, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    layer.update(prompt, 2 * prompt)
    use_backend(layer, backend)
    if isinstance(layer.storage, DynamicStorage):  # only with torch on a CPU
        layer.storage = StaticStorage(layer.storage)
    assert layer.storage.backend.name == backend
    return layer


def masks(count: int, tokens: int) -> list[torch.Tensor | None]:
    """Masks of every kind that attention takes: none (causal), padding, and four-dimensional boolean and additive."""
    padding = torch.ones(2, tokens, dtype=torch.long)
    padding[1, :7] = 0
    causal = torch.zeros(2, 1, count, CAPACITY, dtype=torch.bool)
    causal[..., :tokens] = torch.ones(count, tokens, dtype=torch.bool).tril(tokens - count) & padding[:, None, None] > 0
    return [None, padding, causal, torch.where(causal, 0.5, -1e30)]


@pytest.mark.parametrize(
    ("keys", "sinks", "recent"),
    [(TURBOQUANT, 0, 0), (TURBOQUANT, 53, 2), *((keys, 4, 8) for keys in OTHERS)],
    ids=["none", "many", "groups", "trellis", "pairs", "sketch", "tree", "apart", "anchors"],
)
def test_steps_equal_those_of_operators(keys: dict[str, Any], sinks: int, recent: int) -> None:
    """Compare dense tokens, codes, counters and attention under every mask, across a flush and the end of the sinks."""
    layers = [static_layer(backend, keys, sinks, recent) for backend in ("torch", "triton")]
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    tokens = 50
    for step, count in enumerate([16, 5, 16, 1]):
        tokens += count
        fresh, query = (torch.randn(2, heads, count, DIM, generator=generator) for heads in (HEADS, HEADS * GROUPS))
        angles = torch.rand(2, count, DIM, generator=generator)
        mask = masks(count, tokens)[step]
        outputs = []
        for layer in layers:
            if layer.track is not None:  # as hooks would set them
                layer.track.inputs = angles.cos(), angles.sin()
            layer._append(fresh, 2 * fresh, counting=True)
            assert layer.cumulative_length == layer.storage.tokens == tokens
        by_operators, by_kernels = (layer.storage for layer in layers)
        assert torch.equal(by_kernels.counts, by_operators.counts)
        if layers[0].track is not None:
            ours, theirs = (storage.rope_rows[:, :-1] for storage in (by_kernels, by_operators))
            assert torch.equal(ours, theirs)
            assert ours.any()
        for side, pools in by_kernels.pools.items():
            for ours, theirs in zip(pools, by_operators.pools[side], strict=True):
                # A product summed in another order may flip a code, and the last bit of a scale.
                if theirs.is_floating_point():
                    torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=0)
                else:
                    assert (ours != theirs).float().mean() < 1e-3
                ours.copy_(theirs)
        for layer in layers:
            outputs.append(attended(layer.views(), AttentionCall.of(query, mask, scaling=0.2)))
        torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-4)
        for ours, theirs in zip(by_kernels.sides.values(), by_operators.sides.values(), strict=True):
            assert torch.equal(ours.sinks, theirs.sinks)
            assert torch.equal(ours.tail.view(), theirs.tail.view())
    packed = [layer.packed_tokens for layer in layers]
    assert packed[0] == packed[1] > 0


def test_faults_are_noted() -> None:
    layer = static_layer("triton", TURBOQUANT, 4, 8)
    fresh = torch.randn(2, HEADS, 2, DIM)
    layer.append(fresh, fresh)
    assert not layer.storage.faults.any()
    bad = fresh.clone()
    bad[1, 0, 1, 3] = torch.nan
    layer.append(fresh, bad)
    assert layer.storage.faults.amax() == NOT_FINITE
    for _ in range(6):
        layer.append(*(torch.randn(2, HEADS, 16, DIM),) * 2)
    assert layer.storage.faults.amax() == FULL
    with pytest.raises(ValueError, match="max_cache_len=140"):
        layer.crop(-1)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_capacity_that_the_sinks_fill(backend: str) -> None:
    """Nothing is ever packed, and slots without a token are hidden."""
    config = {"keys": TURBOQUANT, "values": TURBOQUANT, "sink_tokens": 16, "recent_tokens": 8}
    static, growing = (
        CompressedCache(small_model(1).config, {**config, "backend": "torch", "max_cache_len": capacity}).layers[0]
        for capacity in (12, None)
    )
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    prompt, fresh = (torch.randn(2, HEADS, count, DIM, generator=generator) for count in (5, 1))
    query = torch.randn(2, HEADS * GROUPS, 1, DIM, generator=generator)
    for layer in (static, growing):
        layer.update(prompt, prompt)
        layer.update(fresh, fresh)
    use_backend(static, backend)
    if isinstance(static.storage, DynamicStorage):
        static.storage = StaticStorage(static.storage)
    ours, expected = (attended(layer.views(), AttentionCall.of(query, scaling=0.2)) for layer in (static, growing))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def paged_storage(backend: str, layer: CompressedLayer) -> PagedStorage:
    """Pages of five blocks and four slots with the layer's codecs; their content is the same in every call."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    codecs, windows = layer.storage.codecs, layer.storage.windows
    page = math.lcm(64, windows.group)
    pools = {
        side: tuple(torch.zeros(5, HEADS, page // x.tokens, *x.shape, dtype=x.dtype) for x in codec.fields)
        for side, codec in codecs.items()
    }
    sinks, tails = (
        {side: torch.randn(4, HEADS, count, DIM, generator=generator) for side in codecs}
        for count in (windows.sinks, windows.recent + windows.flush)
    )
    track = copy.copy(layer.track)
    if track is not None:
        track.buffer = torch.zeros_like(track.buffer[:1])
        track.buffer[..., : track.buffer.shape[2] // 2] = 1  # cos and sin of no rotation
    return PagedStorage(codecs, pools, sinks, tails, windows, page, BACKENDS[backend], track)


@pytest.mark.parametrize("keys", [TURBOQUANT, *OTHERS], ids=lambda keys: keys["method"] + keys.get("estimator", ""))
def test_steps_over_pages_equal_those_of_operators(keys: dict[str, Any]) -> None:
    """Compare dense tokens, codes and refused tokens of requests with empty slots, some sinks, and tails to flush."""
    layer = static_layer("torch", keys, 4, 8)
    storages = [paged_storage(backend, layer) for backend in ("torch", "triton")]
    windows, page = storages[0].windows, storages[0].page
    full = windows.recent + windows.flush
    lengths = [(0, 0), (3, 0), (4 + full - 1, 0), (4 + page + full, page)]
    tables = [[], [], [3], [1, 4]]
    requests = [
        [Request(3 - slot, blocks, *counts) for slot, (blocks, counts) in enumerate(zip(tables, lengths, strict=True))]
        for _ in storages
    ]
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    for bad in (None, None, 2):
        fresh = torch.randn(1, HEADS, 4, DIM, generator=generator)
        if bad is not None:
            fresh[0, 1, bad, 5] = torch.inf
        refused = []
        for storage, own in zip(storages, requests, strict=True):
            step = Step([(request, 1) for request in own], windows, page, fresh.device)
            storage.append(step, fresh, 2 * fresh)
            refused.append(step.refused())
        assert refused[0] == refused[1] == [index == bad for index in range(4)]
    assert [request.packed for request in requests[0]] == [0, 0, windows.flush, page + windows.flush]
    operators, kernels = storages
    for side in ("keys", "values"):
        if bad is not None:  # operators clear a refused token in all heads
            for storage in storages:
                storage.tails[side][1, :, (full - 1 + 2) % full] = 0
        assert torch.equal(kernels.sinks[side], operators.sinks[side])
        assert torch.equal(kernels.tails[side], operators.tails[side])
        for one, other in zip(operators.pools[side], kernels.pools[side], strict=True):
            assert one.any()
            assert (one != other).float().mean() < 1e-3
