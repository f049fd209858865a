"""`torch.compile` of a model with compressed caches: no graph break, few recompilations, the same results."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cache_name import feed, with_cache
from support.models.small_model import VOCAB, method_config, small_config, small_model
from support.recorded_paths import record_paths
from transformers import CompileConfig, PreTrainedModel

from kvcache_compress import CompressedCache, enable_fused_attention

STEPS = 36
"""Steps; enough to cross a flush and to grow buffers."""
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_steps_before_anything_is_packed() -> None:
    """Attention does not keep parts of a codec made before the codec had its statistics."""
    model = small_model(1)
    enable_fused_attention(model)
    keys = {"method": "turboquant", "center": "on"}
    config = {"keys": keys, "values": {"method": "turboquant", "bits": 2.5}, "sink_tokens": 4, "recent_tokens": 8}
    ids = torch.randint(1, VOCAB, (2, 30 + 16), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    logits = []
    for step in (model, compiled):
        cache = CompressedCache(model.config, config)
        feed(model, cache, ids[:, :30])
        logits.append(feed(step, cache, ids[:, 30:], [1] * 16))
        assert cache.packed_tokens == 32
    torch.testing.assert_close(logits[1], logits[0], **TOLERANCE)


@torch.no_grad()
def decode(step: Any, model: PreTrainedModel, cache: CompressedCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a left-padded prompt of 60 tokens, not compiled, and of single tokens through `step`.

    With a static capacity the padding mask is as long as that from the start.
    """
    capacity = cache.compression.max_cache_len
    mask = torch.ones(2, capacity or ids.shape[1], dtype=torch.long)
    mask[1, :9] = 0
    logits = []
    for at, part in zip([0, *range(60, ids.shape[1])], ids.split([60, *[1] * (ids.shape[1] - 60)], 1), strict=True):
        stop = at + part.shape[1]
        positions = (mask[:, :stop].cumsum(-1) - 1).clamp_min(0)[:, at:].contiguous()
        run = model if at == 0 else step
        seen = mask if capacity else mask[:, :stop]
        output = run(input_ids=part, **with_cache(cache), attention_mask=seen, position_ids=positions)
        logits.append(output.logits)
    return torch.cat(logits, 1)[:, 9:]


@pytest.mark.parametrize(
    ("method", "layers", "fused", "capacity", "steps"),
    [
        ("turboquant", 1, True, None, ""),
        ("commvq", 2, True, 100, ""),
        ("kivi", 2, False, 100, ""),
        ("commvq", 1, True, 100, "static_shapes"),
    ],
)
def test_whole_graph(
    method: str, layers: int, fused: bool, capacity: int | None, steps: str, request: pytest.FixtureRequest
) -> None:
    """Compile with `fullgraph`, which raises at a graph break; CommVQ's positions are in the graph as well.

    The compiled cache has another config object, equal to the model's.
    """
    if steps:
        request.getfixturevalue(steps)
    model = small_model(layers)
    if fused:
        enable_fused_attention(model)
    config = {**method_config(method, layers), "max_cache_len": capacity}
    ids = torch.randint(1, VOCAB, (2, 60 + STEPS), generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    caches = [CompressedCache(model.config, config), CompressedCache(small_config(layers), config)]
    expected = decode(model, model, caches[0], ids)
    with record_paths() as taken:
        torch.testing.assert_close(decode(compiled, model, caches[1], ids), expected, **TOLERANCE)
    assert [call for call in taken if call.queries == 1] == [
        (caches[1].layers[0].backend.name, 1)
    ] * STEPS * layers * fused
    assert caches[0].packed_tokens == caches[1].packed_tokens == 64
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1 if capacity else graphs <= 4


def test_generate_compiles_by_itself() -> None:
    model = small_model(1)
    enable_fused_attention(model)
    options = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    options._compile_all_devices = True
    ids = torch.randint(1, VOCAB, (2, 50), generator=torch.Generator().manual_seed(1))
    outputs = []
    for compile_config in (None, options):
        cache = CompressedCache(model.config, {**method_config("turboquant", 1), "max_cache_len": 100})
        how = {"compile_config": compile_config, "disable_compile": compile_config is None}
        outputs.append(model.generate(ids, **with_cache(cache), max_new_tokens=40, do_sample=False, **how))
        assert cache.packed_tokens > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch.equal(*outputs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's C++ backend needs g++")
@torch.no_grad()
def test_chunks_of_compiled_code_count_once() -> None:
    """Tokens are counted once although the compiler may read a layer's counter after the tokens are stored."""
    model = small_model(1)
    ids = torch.randint(1, VOCAB, (1, 113), generator=torch.Generator().manual_seed(1))
    compiled, logits = torch.compile(model.forward, fullgraph=True), []
    for step in (model, compiled):
        cache = CompressedCache(model.config, {**method_config("turboquant", 1), "max_cache_len": 130})
        feed(model, cache, ids[:, :60])
        logits.append(feed(step, cache, ids[:, 60:], [1, 25, 25, 1, 1]))
        assert int(cache.get_seq_length()) == 113
    torch.testing.assert_close(logits[1], logits[0], **TOLERANCE)
