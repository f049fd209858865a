"""Static capacity: steps of static shapes that never wait, what is refused, dtypes, and first prompts."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.kernels.attention_cases import attended
from support.oracle import CONFIGS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from kvcache_compress import CompressedCache
from kvcache_compress.attention import compile_ops as ops
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage import checks
from kvcache_compress.storage.static import StaticStorage

TOLERANCE = {"atol": 1e-4, "rtol": 0}
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


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_steps_on_cpus_encode_a_block_at_a_time(unfused: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs, tokens are encoded once in 32 steps, to the same codes as in the growing layer, and checked once."""
    growing, static = (unfused.cache(max_cache_len=room, backend=backend) for room in (None, CAPACITY))
    prompt, *steps = torch.randn(2, 2, 124, 32, generator=torch.Generator().manual_seed(0)).split([60, *[1] * 64], 2)
    checked: list[int] = []
    encoded: list[int] = []
    longest = checks.longest

    def check(x: torch.Tensor) -> torch.Tensor:
        checked.append(x.shape[2])
        return longest(x)

    def encode(original: Callable[..., Any], x: torch.Tensor, *rest: Any) -> Any:
        encoded.append(x.shape[2])
        return original(x, *rest)

    for twin, layer in zip(growing.layers, static.layers, strict=True):
        if not hasattr(layer, "sides"):
            continue
        twin.append(prompt, prompt)
        layer.append(prompt, prompt)
        sides = layer.sides.values()
        buffers = [buffer.data_ptr() for state in sides for buffer in state.store.buffers]
        before = layer.packed_tokens
        for token in steps:
            twin.append(token, token)
        with monkeypatch.context() as patch:
            patch.setattr(checks, "longest", check)
            for state in sides:
                patch.setattr(state.codec, "encode", partial(encode, state.codec.encode))
            for token in steps:
                layer.append(token, token)
        assert layer.packed_tokens == twin.packed_tokens == before + 64
        assert encoded == [layer.flush_tokens] * (2 * 64 // layer.flush_tokens)
        assert checked == [1] * 2 * 64
        assert buffers == [buffer.data_ptr() for state in sides for buffer in state.store.buffers]
        for state, other in zip(sides, twin.sides.values(), strict=True):
            fields = zip(state.store.read(0, before + 64), other.store.read(0, before + 64), strict=True)
            assert all(torch.equal(*both) for both in fields)
        checked.clear()
        encoded.clear()


def test_what_is_not_finite_or_too_much_is_refused(unfused: Any, ids: torch.Tensor) -> None:
    """Tokens that are not finite, or too many, are refused by steps and prompts, and no layer changes."""
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
    """Wider dtypes widen the buffers and narrower ones are converted, as in the growing layer."""
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
def test_padding_mask_of_flash_attention(tiny_model: Any, capacity: int) -> None:
    """A padding mask `[B, tokens so far]` gives the same result as the four-dimensional causal mask."""
    side = {"method": "turboquant"}
    config = {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 8, "max_cache_len": capacity}
    layer = layer_of(tiny_model, config)
    states = torch.randn(2, 2, 73, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :70], states[:, :, :70])
    layer.update(states[:, :, 70:], states[:, :, 70:])
    padding = torch.ones(2, 73, dtype=torch.long)
    padding[1, :9] = 0
    whole = torch.zeros(2, 1, 3, capacity, dtype=torch.bool)
    whole[..., :73] = torch.ones(3, 73, dtype=torch.bool).tril(70) & padding[:, None, None].bool()
    query = torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(1))
    got, expected = (attended(layer.views(), AttentionCall.of(query, mask, scaling=0.2)) for mask in (padding, whole))
    torch.testing.assert_close(got, expected)


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


@pytest.fixture
def static_layer(static_shapes: None) -> CompressedLayer:
    """A layer with steps of static shapes, with 50 tokens in bfloat16 and a capacity of 80."""
    config = {"keys": "turboquant", "values": "turboquant", "sink_tokens": 4, "recent_tokens": 8, "max_cache_len": 80}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layer = CompressedCache(LlamaConfig(num_hidden_layers=1, **sizes), {**config, "backend": "torch"}).layers[0]
    x = torch.randn(1, 2, 50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.update(x, x)
    assert layer.packed_tokens > 0
    return layer


def test_rows_that_are_gone_take_no_memory(static_layer: CompressedLayer) -> None:
    """Packed tokens of rows that a batch operation removed are freed."""
    old = [weakref.ref(buffer) for side in static_layer.sides.values() for buffer in side.store.buffers]
    static_layer.batch_repeat_interleave(2)
    gc.collect()
    assert static_layer.sides["keys"].sinks.shape[0] == 2
    assert not any(buffer() is not None for buffer in old)


def test_refused_tokens_change_no_dtype(static_layer: CompressedLayer) -> None:
    """Refused tokens do not widen the buffers."""
    for refused in (torch.zeros(1, 2, 40, 32), torch.full((1, 2, 20, 32), torch.inf)):
        with pytest.raises(ValueError, match=r"max_cache_len=80|NaN"):
            static_layer.update(refused, refused)
    assert static_layer.keys.dtype == torch.bfloat16
    assert static_layer.keys.shape[2] == static_layer.get_seq_length() == 50
