"""Static capacity: equal to the growing cache after every operation, with steps whose shapes never change."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from support.attention_cases import attended
from support.cache_name import with_cache
from support.closeness import assert_close_but_for_flips
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, StaticCache

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import compile_ops as ops
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage import checks
from kvcache_compress.storage import static as static_storage
from kvcache_compress.storage.static import StaticStorage

TOLERANCE = {"atol": 1e-4, "rtol": 0}
CAPACITY = 230
SIZES = [60, 1, 5, 20, 1, 16, 16, 1, 1]
"""Sizes of a prompt, steps, a chunk, and the largest steps, which cross a flush."""
SOME = [(name, fused) for name in ("turboquant-4", "kivi-4", "commvq", "mixed") for fused in (False, True)]
"""Configurations without and with groups of tokens, with positions, and with layers of Transformers' own."""
croppable_cases = pytest.mark.parametrize("case", SOME[:-2], indirect=True, ids=lambda p: f"{p[0]}-{p[1]}")
some_cases = pytest.mark.parametrize("case", SOME, indirect=True, ids=lambda p: f"{p[0]}-{p[1]}")
both_kinds_of_steps = pytest.mark.usefixtures("both_kinds")
some_unfused = pytest.mark.parametrize("unfused", ["turboquant-4", "commvq"], indirect=True)


@pytest.fixture(params=[False, True], ids=["as_growing", "static_shapes"])
def both_kinds(request: pytest.FixtureRequest) -> None:
    """Run with the steps of CPUs, and with those of other devices."""
    if request.param:
        request.getfixturevalue("static_shapes")


def layer_of(model: Any, config: dict[str, Any]) -> Any:
    return CompressedCache(model.config, config).layers[1]


def pair(case: Any, **changes: Any) -> tuple[Any, Any]:
    """A growing cache and one of static capacity with the same configuration."""
    return case.cache(**changes), case.cache(max_cache_len=CAPACITY, **changes)


@pytest.mark.parametrize("padding", [11, 58])
@both_kinds_of_steps
def test_equals_the_growing_cache(case: Any, ids: torch.Tensor, padding: int) -> None:
    """Of a row with 58 tokens of padding the prompt has fewer tokens than there are sinks; steps bring the rest."""
    total = sum(SIZES)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    growing, static = pair(case, backend="torch")  # C++ attention of chunks differs by rounding, which can flip codes.
    results = [case.feed(one, ids[:, :total], SIZES, mask)[:, padding:] for one in (growing, static)]
    assert_close_but_for_flips(*results)
    assert static.packed_tokens == growing.packed_tokens > 64
    assert int(static.get_seq_length()) == growing.get_seq_length() == total
    assert static.get_max_length() == CAPACITY
    assert static.is_compileable


@pytest.mark.parametrize("sinks", [2, 4, 16])
@pytest.mark.parametrize("case", SOME, indirect=True, ids=lambda p: f"{p[0]}-{p[1]}")
@both_kinds_of_steps
def test_padding_that_ends_in_a_short_chunk(case: Any, ids: torch.Tensor, sinks: int) -> None:
    """The second chunk is as short as a step, and shows that the padding of a row is longer than the first one."""
    sizes = [60, 16, *[1] * 40]
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    growing, static = pair(case, backend="torch", sink_tokens=sinks)
    seen = mask[:, : sum(sizes)].bool()
    results = [case.feed(one, ids[:, : sum(sizes)], sizes, mask)[seen] for one in (growing, static)]
    assert_close_but_for_flips(*results)
    assert static.packed_tokens == growing.packed_tokens > 0


@both_kinds_of_steps
@croppable_cases
def test_operations_between_steps(case: Any, ids: torch.Tensor) -> None:
    """Steps after batch operations, copies and crops go on as in the growing cache."""
    results = []
    growing, static = pair(case)
    for cache in (growing, static):
        logits = [case.feed(cache, ids[:, :70], [60, 10])]
        cache.reorder_cache(torch.tensor([1, 1]))
        logits.append(case.feed(cache, ids[:, 70:90], [1, 1, 16, 2]))
        cache.batch_repeat_interleave(2)
        logits.append(case.feed(cache, ids[:, 90:95].repeat(2, 1), [1] * 5))
        cache.batch_select_indices(torch.tensor([0, 3]))
        cache.crop(-7)
        case.feed(cache, ids[:, 100:112], [10, 1, 1])
        cache.crop(-40)
        twin = copy.deepcopy(cache)
        logits += [case.feed(one, ids[:, 95:140], [1, 16, 16, 9, 3]) for one in (twin, cache)]
        assert torch.equal(logits[-1], logits[-2])
        results.append(torch.cat([x.flatten() for x in logits]))
    assert static.packed_tokens == growing.packed_tokens > 0
    torch.testing.assert_close(*results, **TOLERANCE)


@both_kinds_of_steps
@some_cases
def test_reset_starts_anew(case: Any, ids: torch.Tensor) -> None:
    cache, new = case.cache(max_cache_len=CAPACITY), case.cache(max_cache_len=CAPACITY)
    case.feed(cache, ids[:, 100:180], [75, 5])
    cache.reset()
    assert int(cache.get_seq_length()) == cache.packed_tokens == 0
    sizes = [60, 14, 16]
    assert torch.equal(case.feed(cache, ids[:, :90], sizes), case.feed(new, ids[:, :90], sizes))
    assert cache.packed_tokens > 0


@both_kinds_of_steps
@some_cases
@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_and_not(case: Any, ids: torch.Tensor, first: bool) -> None:
    results = []
    growing, static = pair(case)
    for cache in (growing, static):
        with torch.inference_mode(first), torch.no_grad():
            case.feed(cache, ids[:, :70], [60, 10])
        with torch.inference_mode(not first), torch.no_grad():
            cache.reorder_cache(torch.tensor([1, 0]))
            results.append(case.feed(cache, ids[:, 70:101], [1, 14, 16]).clone())
    assert static.packed_tokens > 0
    torch.testing.assert_close(*results, **TOLERANCE)


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
    growing, static = pair(unfused, backend=backend)
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


@some_cases
def test_what_is_not_finite_or_too_much_is_refused(case: Any, ids: torch.Tensor) -> None:
    """Tokens that are not finite, or too many, are refused by steps and prompts, and no layer changes."""
    cache = case.cache(max_cache_len=80)
    case.feed(cache, ids[:, :70], [60, 10])
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
    new = case.cache(max_cache_len=80).layers[1]
    with pytest.raises(ValueError, match="NaN"):
        new.update(*(torch.full((2, 2, 40, 32), torch.inf),) * 2)
    # If a step cannot wait for the check, the next operation that can raises.
    layer.storage = StaticStorage(layer.storage)
    layer.update(bad[:, :, -1:], bad[:, :, -1:])
    with pytest.raises(ValueError, match="NaN"):
        layer.crop(-1)


@some_cases
def test_a_refused_step_leaves_all_layers_alike(case: Any, ids: torch.Tensor) -> None:
    cache, other = pair(case)[1], pair(case)[1]
    for one in (cache, other):
        case.feed(one, ids[:, :70], [60, 10])
    weight = case.model.model.layers[0].mlp.down_proj.weight
    kept = weight[0, 0].clone()
    weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        case.feed(cache, ids[:, 70:71])
    weight[0, 0] = kept
    if all(layer.is_croppable for layer in cache.layers):
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {70}
        rest = [case.feed(one, ids[:, 70:90], [1, 16, 3]) for one in (cache, other)]
        torch.testing.assert_close(*rest, **TOLERANCE)


@both_kinds_of_steps
def test_dtypes_that_change(tiny_model: Any) -> None:
    """Wider dtypes widen the buffers and narrower ones are converted, as in the growing layer."""
    side = {"method": "turboquant"}
    config = {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 8}
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 2, 80, 32, generator=generator)
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32]
    layers = [layer_of(tiny_model, {**config, "max_cache_len": capacity}) for capacity in (None, 100)]
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
def test_padding_mask_of_flash_attention(tiny_model: Any) -> None:
    """A padding mask `[B, tokens so far]` gives the same result as the four-dimensional causal mask."""
    side = {"method": "turboquant"}
    config = {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 8, "max_cache_len": 100}
    layer = layer_of(tiny_model, config)
    states = torch.randn(2, 2, 73, 32, generator=torch.Generator().manual_seed(0))
    layer.update(states[:, :, :70], states[:, :, :70])
    layer.update(states[:, :, 70:], states[:, :, 70:])
    padding = torch.ones(2, 73, dtype=torch.long)
    padding[1, :9] = 0
    whole = torch.zeros(2, 1, 3, 100, dtype=torch.bool)
    whole[..., :73] = torch.ones(3, 73, dtype=torch.bool).tril(70) & padding[:, None, None].bool()
    query = torch.randn(2, 6, 3, 32, generator=torch.Generator().manual_seed(1))
    got, expected = (attended(layer.views(), AttentionCall.of(query, mask, scaling=0.2)) for mask in (padding, whole))
    torch.testing.assert_close(got, expected)


@both_kinds_of_steps
def test_resets_and_reports_leave_nothing_behind(tiny_model: Any, ids: torch.Tensor) -> None:
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


@both_kinds_of_steps
@some_unfused
def test_generate(unfused: Any, ids: torch.Tensor) -> None:
    """`generate`, greedy and with beams, gives the same tokens as with the growing cache."""
    for how in ({}, {"num_beams": 2}):
        outputs = []
        for fused in (False, True):
            (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
            for changes in ({}, {"max_cache_len": CAPACITY}):
                cache = unfused.cache(**changes)
                options = {**with_cache(cache), "max_new_tokens": 24, "do_sample": False, **how}
                outputs.append(unfused.model.generate(ids[:, :50], **options))
                assert cache.packed_tokens > 0
        assert all(torch.equal(one, outputs[0]) for one in outputs)


def test_none_everywhere_is_a_static_cache(tiny_model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        config = {"keys": "none", "values": "none", "max_cache_len": 100}
        logits = []
        for cache in (StaticCache(tiny_model.config, 100), CompressedCache(tiny_model.config, config)):
            parts = [ids[:, :60], ids[:, 60:61], ids[:, 61:62]]
            logits.append([tiny_model(input_ids=part, **with_cache(cache)).logits for part in parts])
        assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))
        with pytest.raises(ValueError, match="StaticLayer cannot be cropped"):
            cache.crop(-1)


def test_options(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="quantize_generated=False: allowed True with max_cache_len"):
        CompressedCache(
            tiny_model.config, {"keys": "kivi", "values": "kivi", "max_cache_len": 64, "quantize_generated": False}
        )
    with pytest.raises(ValueError, match="max_cache_len=0"):
        CompressedCache(tiny_model.config, {"keys": "kivi", "values": "kivi", "max_cache_len": 0})


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


def test_an_edit_without_memory_leaves_all_as_it_was(
    static_layer: CompressedLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, step = static_layer.keys.clone(), torch.ones(1, 2, 1, 32, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(static_storage, "StepBuffers", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            static_layer.batch_repeat_interleave(2)
    assert torch.equal(static_layer.keys, keys)
    static_layer.update(step, step)
    assert static_layer.keys.shape == (1, 2, 51, 32)
    assert torch.equal(static_layer.keys[:, :, :50], keys)


@pytest.mark.parametrize("static", [True, False])
def test_refused_tokens_change_no_dtype(static: bool, request: pytest.FixtureRequest) -> None:
    """Refused tokens neither widen the buffers nor set the dtype of an empty layer."""
    if static:
        layer = request.getfixturevalue("static_layer")
    else:
        layer = CompressedCache(
            LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
            {"keys": "turboquant", "values": "turboquant", "max_cache_len": 80},
        ).layers[0]
        x = torch.randn(1, 2, 50, 32, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="NaN"):
            layer.update(x.float() * torch.nan, x.float())
        assert not layer.is_initialized
        layer.update(x, x)
    for refused in (torch.zeros(1, 2, 40, 32), torch.full((1, 2, 20, 32), torch.inf)):
        with pytest.raises(ValueError, match=r"max_cache_len=80|NaN"):
            layer.update(refused, refused)
    assert layer.keys.dtype == torch.bfloat16
    assert layer.keys.shape[2] == layer.get_seq_length() == 50
