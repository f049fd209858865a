"""Memory report: every number checked by hand for one layer, and against all tensors held as a cache grows."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.files.commvq_files import CONTRACT_MODEL
from support.method_cases import declared
from support.models.small_model import SINKS, method_config, small_config
from transformers import DynamicCache, LlamaConfig

from kvcache_compress import CompressedCache, TurboQuantCache, load_config
from kvcache_compress.attention.interface import fused_name
from kvcache_compress.cache.estimate import cache_bytes, rope_bytes
from kvcache_compress.storage.packed_store import SLACK
from kvcache_compress.storage.static import StaticStorage

BATCH, HEADS, DIM, TOKENS = 2, 2, 64, 60
ROWS = BATCH * HEADS
CONFIG = small_config(1, head_dim=DIM)


def filled(cache: Any, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Any:
    for index in range(len(cache.layers)):
        x = torch.randn(BATCH, HEADS, tokens, DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
        cache.update(x, x, index)
    return cache


def test_turboquant_by_hand() -> None:
    """Bytes of 60 tokens by hand: 4 sinks, 32 packed, 24 in the tail; 8 words of 4 bytes and a scale of 2 bytes."""
    cache = filled(TurboQuantCache(CONFIG, bits=4, sink_tokens=4, recent_tokens=8, center=None))
    report = cache.memory_report()
    (layer,) = report.layers
    assert (layer.dense_tokens, layer.packed_tokens, layer.method) == (28, 32, "turboquant")
    assert report.packed_tokens == cache.packed_tokens == 32
    assert report.dense_tokens == 28
    codes, scales = ROWS * 32 * 8 * 4, ROWS * 32 * 2
    dense = 2 * ROWS * 28 * DIM * 4
    assert report.fields == {
        "keys.codes0": codes, "keys.scale": scales, "values.codes0": codes, "values.scale": scales, "dense": dense,
    }  # fmt: skip
    assert report.used_bytes == dense + 2 * (codes + scales)
    # Held: the sinks, room for the window and one flush in the tail, and a packed part with one token to spare.
    assert report.allocated_bytes == 2 * (ROWS * (4 + 40) * DIM * 4 + ROWS * 33 * 34)
    # Per side a rotation, 16 levels and the 256 pairs of them, and the keys' mean.
    assert report.constant_bytes == 2 * (DIM * DIM * 4 + 16 * 4 + 256 * 8) + HEADS * DIM * 4
    assert report.total_bytes == report.allocated_bytes + report.constant_bytes
    numbers = 2 * ROWS * TOKENS * DIM
    assert report.full_bytes == 4 * numbers
    assert report.packed_bits_per_number == 4.25
    # Sinks, the window and what leaves it together, at the bytes of one of the 28 dense tokens each.
    assert report.total_bytes_at_16 == report.total_bytes - dense // 28 * (4 + 8 + 32) // 2
    assert report.bits_per_number == layer.bits_per_number == 8 * report.total_bytes_at_16 / numbers
    assert report.ratio == 4 * numbers / report.total_bytes


def test_layers_that_are_not_ours() -> None:
    config = small_config(3, head_dim=DIM)
    rules = {"keys": "kivi", "values": "kivi", "layers": [{"match": 0, "method": "none"}]}
    cache = CompressedCache(config, {**rules, "sink_tokens": 0, "recent_tokens": 0})
    empty = cache.memory_report()
    assert (empty.total_bytes, empty.full_bytes, empty.packed_tokens) == (0, 0, 0)
    assert math.isnan(empty.ratio)
    assert math.isnan(empty.bits_per_number)
    assert str(empty) == "no tokens; 0.00 KiB held"
    report = filled(cache, 64).memory_report()
    dense = filled(DynamicCache(config=config), 64)
    assert report.layers[0].total_bytes == dense.layers[0].keys.nbytes + dense.layers[0].values.nbytes
    assert report.layers[0].packed_tokens == 0
    assert [layer.packed_tokens for layer in report.layers[1:]] == [64, 64]
    assert report.total_bytes == sum(layer.total_bytes for layer in report.layers)
    assert report.fields["dense"] == report.layers[0].total_bytes


@pytest.mark.usefixtures("static_shapes")
def test_tails_of_static_layers_count_16_bits() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        cache = filled(TurboQuantCache(CONFIG, sink_tokens=4, recent_tokens=8, max_cache_len=120), 64, dtype)
        filled(cache, 1, dtype)
        assert isinstance(cache.layers[0].storage, StaticStorage)
        found.append(cache.memory_report())
    wide, narrow = found
    assert wide.bits_per_number == narrow.bits_per_number
    assert wide.total_bytes > narrow.total_bytes
    assert wide.full_bytes == 2 * narrow.full_bytes
    assert narrow.ratio == narrow.full_bytes / narrow.total_bytes


def test_prints_a_table_and_the_parts_of_what_is_held() -> None:
    report = filled(TurboQuantCache(CONFIG, bits=4, sink_tokens=4, recent_tokens=8)).memory_report()
    lines = str(report).splitlines()
    assert all(len(line) <= 80 for line in lines)
    (row,) = (line for line in lines if "turboquant" in line)
    assert row.split()[:4] == ["0", "turboquant", "28", "32"]
    _, parts = " ".join(lines).split("held by part: ")
    scales = {"KiB": 2**10, "MiB": 2**20}
    sizes = [float(part.split()[-2]) * scales[part.split()[-1]] for part in parts.split(", ")]
    assert sum(sizes) == pytest.approx(report.total_bytes, rel=1e-3), "the parts are all that is held"


def held_bytes(root: Any) -> int:
    """Bytes of all tensors reachable from an object's attributes, memory that several share counted once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (str, bytes, type, Callable)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, (list, tuple, set)):
            queue += item
        elif type(item).__module__.startswith("kvcache_compress"):
            queue += getattr(item, "__dict__", {}).values()
    return sum(x.untyped_storage().nbytes() for x in found.values())


GROWING = {name: method_config(name) for name in ("turboquant", "kivi")} | declared("CONTRACT")


@pytest.mark.parametrize("name", GROWING)
def test_memory_grows_as_estimated(name: str, one_era: None) -> None:
    """Over 2,000 tokens all bytes held are in the report, and bytes in use equal those computed from the shape."""
    batch, heads, dim, layers, step = 2, 2, 32, CONTRACT_MODEL["num_hidden_layers"], 5
    config = load_config({**GROWING[name], "sink_tokens": SINKS, "recent_tokens": 64})
    decoder = LlamaConfig(**CONTRACT_MODEL)
    decoder._attn_implementation = fused_name("sdpa")
    cache = CompressedCache(decoder, config)
    generator = torch.Generator().manual_seed(0)
    plan = cache.layers[0].plan
    for tokens in range(step, 2000 + step, step):
        for layer in range(layers):
            states = torch.randn(2, batch, heads, step, dim, generator=generator).bfloat16()
            cache.update(states[0], states[1], layer)
        if tokens % 500 and tokens != 150:
            continue
        report = cache.memory_report()
        held = held_bytes(cache)
        assert held <= report.total_bytes <= 1.05 * held  # small tables that layers share count in each of them
        waiting = report.dense_tokens - (plan.sink_tokens + plan.recent_tokens)
        assert 0 <= waiting < cache.layers[0].flush_tokens + step
        rope = batch * rope_bytes(config, dim, layers, tokens)
        assert report.fields.get("rope", 0) == rope
        estimate = cache_bytes(config, layers, heads, dim, tokens, batch) + rope
        assert 0.95 * estimate <= report.allocated_bytes <= (1 + SLACK) * estimate
    assert report.packed_tokens > 1800


MORE = {
    "turboquant-prod-1bit": {"method": "turboquant", "bits": 1, "estimator": "prod"},
    "turboquant-prod-2.5bit": {"method": "turboquant", "bits": 2.5, "estimator": "prod"},
}
CASES = declared("CONTRACT") | {name: {"keys": side, "values": side} for name, side in MORE.items()}


@pytest.mark.parametrize(("tokens", "kernels"), [(20, False), (80, False), (80, True)])
@pytest.mark.parametrize("name", CASES)
def test_constants_are_all_that_a_codec_holds(name: str, tokens: int, kernels: bool, one_era: None) -> None:
    """Every tensor reachable from a side is a segment, a store's buffer or counted as a constant, none of them twice.

    This holds before and after the first tokens are packed.
    """
    model = LlamaConfig(**CONTRACT_MODEL)
    if kernels:
        pytest.importorskip("triton")
    cache = CompressedCache(model, {**CASES[name], "sink_tokens": 4, "recent_tokens": 8, "backend": "torch"})
    x = torch.randn(1, 2, tokens, 32, generator=torch.Generator().manual_seed(0))
    cache.update(x, x, 0)
    layer = cache.layers[0]
    if kernels:
        for state in layer.sides.values():
            if side := state.codec.kernel_side:
                side.tables_as(torch.float16)
    report = cache.memory_report()
    assert (report.packed_tokens > 0) == (tokens == 80)
    assert held_bytes(list(layer.sides.values())) == report.total_bytes
