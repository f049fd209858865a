"""Thousands of tokens: lengths, masks and positions do not drift, memory grows as reported, nothing leaks."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.files.commvq_files import CONTRACT_MODEL
from support.method_cases import declared
from support.models.small_model import METHODS, SINKS, VOCAB, method_config, mixed_config, small_model
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention, load_config
from kvcache_compress.attention.interface import ATTENTION_NAME
from kvcache_compress.cache.estimate import cache_bytes, rope_bytes
from kvcache_compress.cache.layer import FLUSH_TOKENS
from kvcache_compress.storage.shared.rope_track import DTYPE

LAYERS = 2
PADDED = 7


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(LAYERS)


@pytest.fixture
def prompt() -> dict[str, torch.Tensor]:
    """Two prompts of 40 tokens, the second with padding on its left."""
    ids = torch.randint(1, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def recorded(model: LlamaForCausalLM, cache: Cache) -> Iterator[list[tuple[Any, ...]]]:
    """Record of each step: positions, tokens visible to the last query, and the cache's lengths before it."""
    steps: list[tuple[Any, ...]] = []

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions, mask = kwargs["position_ids"], kwargs["attention_mask"]
        count = positions.shape[1]
        shown = None if mask is None else (tuple(mask.shape), mask[:, 0, -1].sum(-1).tolist())
        lengths = [cache.get_seq_length(index) for index in range(LAYERS)]
        steps.append((positions.tolist(), shown, lengths, cache.get_mask_sizes(count, 0)))

    handle = model.model.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield steps
    finally:
        handle.remove()


def run(model: LlamaForCausalLM, cache: Cache, prompt: dict[str, Any], tokens: int, **how: Any) -> Any:
    """Generate, and return the sequences and the record of every step."""
    with recorded(model, cache) as steps:
        output = model.generate(**prompt, **with_cache(cache), max_new_tokens=tokens, do_sample=False, **how)
    return output, steps


def mixed_cache(model: LlamaForCausalLM) -> CompressedCache:
    return CompressedCache(model.config, mixed_config())


def held_tensors(root: Any) -> dict[int, torch.Tensor]:
    """All tensors reachable from an object's attributes, by the address of their memory."""
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
    return found


def test_2000_tokens(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor]) -> None:
    """Each of 2,000 steps has the same positions, mask and lengths as with a dense cache."""
    tokens, dense = 2000, DynamicCache()
    prompt = {name: x[1:] for name, x in prompt.items()}
    _, expected = run(model, dense, prompt, tokens)
    enable_fused_attention(model)
    kivi = {side: method_config("kivi")[side] for side in ("keys", "values")}
    cache = CompressedCache(model.config, {**mixed_config(), "layers": [{"match": 1, **kivi}]})
    output, steps = run(model, cache, prompt, tokens)
    disable_fused_attention(model)
    assert output.shape == (1, 40 + tokens)
    assert len(steps) == tokens
    assert steps == expected
    assert cache.get_seq_length() == dense.get_seq_length() == 40 + tokens - 1
    assert cache.packed_tokens > tokens - 2 * FLUSH_TOKENS
    (track,) = cache.rope_tracks
    assert track.tokens == cache.get_seq_length()
    packed = cache.packed_tokens // track.stride * track.stride
    positions = (torch.arange(0, packed, track.stride) + track.first)[None] - PADDED
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions.clamp_min(0))
    stored = track.read(0, packed)
    for factors, exact in zip(stored, track.layout.factors((cos, sin)), strict=True):
        assert torch.equal(factors, exact.to(DTYPE))


def test_beams(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor]) -> None:
    """Beam search over 150 steps, with rows that are reordered at nearly every step."""
    tokens, dense = 150, DynamicCache()
    _, expected = run(model, dense, prompt, tokens, num_beams=4)
    enable_fused_attention(model)
    cache = mixed_cache(model)
    output, steps = run(model, cache, prompt, tokens, num_beams=4)
    disable_fused_attention(model)
    assert output.shape == (2, 40 + tokens)
    assert steps == expected
    assert cache.get_seq_length() == dense.get_seq_length()
    assert cache.packed_tokens > tokens - 2 * FLUSH_TOKENS


@pytest.mark.parametrize("fused", [False, True])
def test_prompt_lookup(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor], fused: bool) -> None:
    """Steps of up to 8 tokens, some of them rejected, each begin where the accepted tokens end."""
    tokens = 600
    one = {"input_ids": prompt["input_ids"][:1, :20].repeat(1, 2)}
    (enable_fused_attention if fused else disable_fused_attention)(model)
    cache = mixed_cache(model)
    output, steps = run(model, cache, one, tokens, prompt_lookup_num_tokens=7)
    disable_fused_attention(model)
    sizes = [len(positions[0]) for positions, *_ in steps]
    starts = [positions[0][0] for positions, *_ in steps]
    taken_back = [start + size - after for start, size, after in zip(starts, sizes, starts[1:], strict=False)]
    assert output.shape == (1, 40 + tokens)
    assert max(sizes[1:]) == 8
    assert max(taken_back) > 0
    assert min(taken_back) >= 0
    for (positions, _, lengths, (mask_length, offset)), start, size in zip(steps, starts, sizes, strict=True):
        assert positions == [list(range(start, start + size))]
        assert lengths == [start] * LAYERS
        assert (mask_length, offset) == (start + size, 0)
    assert cache.packed_tokens > tokens - 4 * FLUSH_TOKENS


CASES = {name: method_config(name) for name in METHODS if name != "commvq"} | declared("CONTRACT")


@pytest.mark.parametrize("name", CASES)
def test_memory_grows_as_estimated(name: str) -> None:
    """Over 2,000 tokens all bytes held are in the report, and bytes in use equal those computed from the shape."""
    batch, heads, dim, layers, step = 1, 2, 32, CONTRACT_MODEL["num_hidden_layers"], 5
    config = load_config({**CASES[name], "sink_tokens": SINKS, "recent_tokens": 64})
    decoder = LlamaConfig(**CONTRACT_MODEL)
    decoder._attn_implementation = ATTENTION_NAME
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
        held = sum(x.untyped_storage().nbytes() for x in held_tensors(cache).values())
        assert held <= report.total_bytes <= 1.05 * held  # small tables that layers share count in each of them
        estimate = cache_bytes(config, layers, heads, dim, tokens, batch)
        waiting = report.dense_tokens - (plan.sink_tokens + plan.recent_tokens)
        assert 0 <= waiting < cache.layers[0].flush_tokens + step
        per_token = cache_bytes(config, layers, heads, dim, 1, batch)
        assert report.rope_used_bytes == batch * rope_bytes(config, dim, layers, tokens)
        used = report.used_bytes - report.rope_used_bytes
        assert estimate <= used <= estimate + waiting * per_token
        spare = (plan.recent_tokens + cache.layers[0].flush_tokens + step) * per_token
        assert report.allocated_bytes <= 1.125 * report.used_bytes + spare
    assert report.packed_tokens > 1800


def generations(model: LlamaForCausalLM, prompt: dict[str, Any], count: int, fused: bool) -> list[Any]:
    """Weak references to the caches of this many calls."""
    caches = []
    with compress(model, mixed_config(), fused=fused) as handle:
        for _ in range(count):
            model.generate(**prompt, max_new_tokens=3, do_sample=False)
            assert handle.last_cache.packed_tokens > 0
            caches.append(weakref.ref(handle.last_cache))
    return caches


_TRACED = (FakeTensor, FunctionalTensor)


def live_bytes() -> int:
    """Bytes of all tensors in the process, memory that several share counted once."""
    gc.collect()
    # `type(x)`, since a lazy object may import its module when asked for its class. What a compiler leaves of the tests
    # before has no memory.
    kinds = ((x, type(x)) for x in gc.get_objects())
    tensors = [x for x, kind in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, _TRACED)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("fused", [False, True])
def test_50_generations_leave_nothing(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor], fused: bool) -> None:
    """Caches are freed at once, without the garbage collector, and no tensor remains."""
    prompt = {name: x.repeat(1, 2) for name, x in prompt.items()} | {"attention_mask": torch.ones(2, 80).long()}
    generations(model, prompt, 2, fused)
    before = live_bytes()
    gc.disable()
    try:
        caches = generations(model, prompt, 50, fused)
        assert len(caches) == 50
        assert not any(cache() for cache in caches)
    finally:
        gc.enable()
    assert live_bytes() == before


def test_resets_hold_no_more(model: LlamaForCausalLM, prompt: dict[str, torch.Tensor]) -> None:
    """A cache that is reset between 20 prompts holds as much memory as after the first."""
    cache = mixed_cache(model)
    sizes = set()
    for _ in range(20):
        cache.reset()
        with torch.no_grad():
            model(prompt["input_ids"].repeat(1, 2), **with_cache(cache))
        assert cache.packed_tokens == 64
        sizes.add(sum(x.untyped_storage().nbytes() for x in held_tensors(cache).values()))
    assert len(sizes) == 1
