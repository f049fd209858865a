"""Static capacity: steps of static shapes that never wait, chunks tile by tile, what is refused, and dtypes."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.kernels.attention_cases import attended
from support.oracle import CONFIGS, TOLERANCE, assert_close_but_for_flips, label
from support.recorded_paths import PathTaken, record_paths
from torch.utils._python_dispatch import TorchDispatchMode

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import compile_ops as ops
from kvcache_compress.attention import interface as attention
from kvcache_compress.backends import tiled
from kvcache_compress.backends.tiled import TILED
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.side import MAX_DECODE_TOKENS
from kvcache_compress.storage.static import StaticStorage

CAPACITY = 230
both_kinds_of_steps = pytest.mark.parametrize("capacity", ["static", "static_shapes"], indirect=True)


def layer_of(model: Any, config: dict[str, Any]) -> Any:
    return CompressedCache(model.config, config).layers[1]


class _Watch(TorchDispatchMode):
    """Mode that records every operator with the shapes of its results, and refuses to read a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a step waits for the device"
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        self.seen.append((str(func), tuple(x.shape for x in outputs if isinstance(x, torch.Tensor))))
        return result


def test_steps_have_static_shapes_and_never_wait(unfused: Any, ids: torch.Tensor, static_shapes: None) -> None:
    """Every step runs the same operators with the same shapes, across flushes, without reading or moving data."""
    cache = unfused.cache(max_cache_len=CAPACITY, backend="torch")
    with torch.no_grad():
        unfused.feed(cache, ids[:, :62], [60, 2])
    states = torch.randn(2, 2, 36, 32, generator=torch.Generator().manual_seed(0))
    query = torch.randn(2, 6, 1, 32, generator=torch.Generator().manual_seed(1))
    for layer in [layer for layer in cache.layers if hasattr(layer, "sides")]:
        buffers = [b.data_ptr() for side in layer.sides.values() for b in side.store.buffers]
        before, traces = layer.packed_tokens, []
        for at in range(36):
            with _Watch() as watch:
                layer.append(*(states[:, :, at : at + 1],) * 2)
                attended(layer.views(), AttentionCall.of(query, scaling=0.2))
            traces.append(watch.seen)
        assert all(trace == traces[0] for trace in traces)
        assert layer.packed_tokens == before + 32
        assert buffers == [b.data_ptr() for side in layer.sides.values() for b in side.store.buffers]


def test_what_is_not_finite_or_too_much_is_refused(unfused: Any, ids: torch.Tensor) -> None:
    cache = unfused.cache(max_cache_len=80)
    with torch.no_grad():
        unfused.feed(cache, ids[:, :70], [60, 10])
    layer = next(layer for layer in cache.layers if hasattr(layer, "sides"))
    keys = layer.keys.clone()
    for tokens in (1, 5, 9):
        bad = torch.zeros(2, 2, tokens, 32)
        bad[1, 1, tokens - 1, 3] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            layer.update(bad, bad)
    for tokens in (11, 30):
        with pytest.raises(ValueError, match="max_cache_len=80"):
            layer.update(*(keys[:, :, :tokens],) * 2)
    assert int(layer.get_seq_length()) == 70
    assert torch.equal(layer.keys[:, :, :70], keys)
    new = unfused.cache(max_cache_len=80).layers[1]
    with pytest.raises(ValueError, match="NaN"):
        new.update(*(torch.full((2, 2, 40, 32), torch.inf),) * 2)
    # If a step cannot wait for the check, the next operation that can raises.
    layer.storage = StaticStorage(layer.storage)
    layer.update(bad[:, :, -1:], bad[:, :, -1:])
    with pytest.raises(ValueError, match="NaN"):
        layer.crop(-1)


@torch.no_grad()
def test_a_refused_step_leaves_all_layers_alike(unfused: Any, ids: torch.Tensor) -> None:
    cache, other = (unfused.cache(max_cache_len=CAPACITY) for _ in range(2))
    for one in (cache, other):
        unfused.feed(one, ids[:, :70], [60, 10])
    weight = unfused.model.model.layers[0].mlp.down_proj.weight
    kept = weight[0, 0].clone()
    weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        unfused.feed(cache, ids[:, 70:71])
    weight[0, 0] = kept
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {70}
    rest = [unfused.feed(one, ids[:, 70:90], [1, 16, 3]) for one in (cache, other)]
    torch.testing.assert_close(*rest, **TOLERANCE)


@both_kinds_of_steps
def test_dtypes_that_change(tiny_model: Any, capacity: int) -> None:
    side = {"method": "turboquant"}
    config = {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 8}
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 2, 80, 32, generator=generator)
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32]
    layers = [layer_of(tiny_model, {**config, "max_cache_len": room}) for room in (None, capacity)]
    for layer in layers:
        for part, dtype in zip(states.split([50, 1, 1, 20, 8], 2), dtypes, strict=True):
            layer.update(part.to(dtype), part.to(torch.bfloat16 if dtype == torch.float16 else dtype))
        layer.update(states[:, :, :0], states[:, :, :0])
    growing, static = layers
    assert static.packed_tokens == growing.packed_tokens > 0
    assert static.keys.dtype == growing.keys.dtype == torch.float64
    torch.testing.assert_close(static.keys, growing.keys, **TOLERANCE)
    torch.testing.assert_close(static.values, growing.values, **TOLERANCE)


@both_kinds_of_steps
def test_resets_and_reports_leave_nothing_behind(tiny_model: Any, ids: torch.Tensor, capacity: int) -> None:
    before = len(ops._LAYERS)
    config = {"keys": {"method": "turboquant"}, "values": {"method": "turboquant"}, "max_cache_len": 200}
    cache = CompressedCache(tiny_model.config, config)
    with torch.no_grad():
        tiny_model(input_ids=ids[:, :150], **with_cache(cache))
    reports = {str(cache.memory_report()) for _ in range(2)}
    assert len(reports) == 1
    for _ in range(20):
        cache.reset()
    assert len(ops._LAYERS) == before + len(cache.layers)


STARTS = {
    "centred": {"keys": {"method": "turboquant", "center": "on"}, "values": "turboquant"},
    "spectral": CONFIGS["spectral"],
    "own-method": CONFIGS["own-method"],
}


@both_kinds_of_steps
@pytest.mark.parametrize("prompt", [1, 8, 17])
@pytest.mark.parametrize("name", STARTS)
def test_a_first_prompt_of_which_nothing_is_packed(tiny_model: Any, name: str, prompt: int, capacity: int) -> None:
    """A first prompt that stays dense sets the statistics, and early initialization and no tokens set none."""
    windows = {"sink_tokens": 16, "recent_tokens": 0, "max_cache_len": 100}
    keys, values = (torch.randn(1, 2, 90, 32, generator=torch.Generator().manual_seed(i)) for i in range(2))
    layers = []
    for early in (False, True):
        cache = CompressedCache(tiny_model.config, {**STARTS[name], **windows})
        if early:
            cache.early_initialization(1, 2, 32, torch.float32, "cpu")
        layer = cache.layers[0]
        for start, stop in ((0, 0), (0, prompt), *((at, at + 1) for at in range(prompt, 90))):
            layer.update(keys[:, :, start:stop], values[:, :, start:stop])
        assert layer.packed_tokens > 0
        layers.append(layer)
    assert torch.equal(layers[0].keys, layers[1].keys)
    for states, given in ((layers[0].keys, keys), (layers[0].values, values)):
        assert (states[:, :, :90] - given).norm() < given.norm()


@both_kinds_of_steps
def test_refused_tokens_and_rows_that_are_gone_leave_nothing(tiny_model: Any, capacity: int) -> None:
    config = {"keys": "turboquant", "values": "turboquant", "sink_tokens": 4, "recent_tokens": 8}
    layer = layer_of(tiny_model, {**config, "max_cache_len": 80, "backend": "torch"})
    x = torch.randn(1, 2, 50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.update(x, x)
    assert layer.packed_tokens > 0
    for refused in (torch.zeros(1, 2, 40, 32), torch.full((1, 2, 20, 32), torch.inf)):
        with pytest.raises(ValueError, match=r"max_cache_len=80|NaN"):
            layer.update(refused, refused)
    assert layer.keys.dtype == torch.bfloat16
    old = [weakref.ref(buffer) for side in layer.sides.values() for buffer in side.store.buffers]
    layer.batch_repeat_interleave(2)
    gc.collect()
    assert layer.sides["keys"].sinks.shape[0] == 2
    assert not any(buffer() is not None for buffer in old)


TILE = 32
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


def chunks(taken: list[PathTaken], prompt: int) -> list[str]:
    """The paths of chunks; steps are left out, and the prompt."""
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


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("width", [None, 100, 120])
def test_padding_masks_of_flash_attention(model: Any, width: int | None, count: int) -> None:
    layer = layer_of(model, {**TURBOQUANT, "max_cache_len": 120, "backend": "torch"})
    states = torch.randn(2, 2, 100, 32, generator=torch.Generator().manual_seed(0))
    layer.update(*(states[:, :, : 100 - count],) * 2)
    views = layer.update(*(states[:, :, 100 - count :],) * 2)
    padding = torch.ones(2, 120, dtype=torch.long)
    padding[1, :9] = width is None
    whole = torch.zeros(2, 1, count, 120, dtype=torch.bool)
    whole[..., :100] = torch.ones(count, 100, dtype=torch.bool).tril(100 - count)
    whole &= padding[:, None, None].bool()
    query = torch.randn(2, 6, count, 32, generator=torch.Generator().manual_seed(1))
    assert (views[0].path(AttentionCall.of(query, scaling=1.0), views[1]) is TILED) == (count == 20)
    mask = None if width is None else padding[:, :width]
    got, expected = (attended(views, AttentionCall.of(query, one, scaling=0.2)) for one in (mask, whole))
    torch.testing.assert_close(got, expected)
