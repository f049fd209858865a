"""Caches that spread their bits over layers and sides: sizes, operations, and prompts in every form."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import small_model
from transformers import LlamaForCausalLM

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.codecs import base
from kvcache_compress.codecs.base import SIDES
from kvcache_compress.storage.adaptive import bit_budget

METHODS: dict[str, dict[str, Any]] = {
    "spectral": {"method": "spectral", "bits": 3, "group": 32},
    "turboquant": {"method": "turboquant", "bits": 3},
}
LAYERS, LEAST = 4, 64
each = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A model whose layers need unlike bits, because their queries and outputs are of unlike sizes."""
    found = small_model(LAYERS, vocab_size=64, hidden_size=128, num_attention_heads=4)
    for number, layer in enumerate(found.model.layers):
        layer.self_attn.q_proj.weight.data *= 8 ** (number % 2)
    enable_fused_attention(found)
    return found


@pytest.fixture
def one_era() -> None:
    """The other contract tests' fixture, not wanted here."""


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "LEAST_TOKENS", LEAST)
    monkeypatch.setattr(base, "LEAST_IN_STEPS", 2 * LEAST)
    monkeypatch.setattr(bit_budget, "HALF_SURE", 1)
    with torch.no_grad():
        yield


def cache_of(model: Any, method: str, **options: Any) -> CompressedCache:
    config = {"keys": METHODS[method], "values": {"method": "turboquant", "bits": 3}, "bits_by_layer": "auto"}
    return CompressedCache(model.config, {**config, "sink_tokens": 4, "recent_tokens": 16, **options})


def feed(model: Any, cache: Any, *sizes: int, seed: int = 0) -> torch.Tensor:
    """Logits of the last of random chunks of these sizes, for two rows."""
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        logits = model(torch.randint(0, 64, (2, size), generator=generator), **with_cache(cache)).logits
    return torch.as_tensor(logits)


def bits(cache: Any) -> list[list[float]]:
    return [[layer.sides[side].codec.options.bits for side in SIDES] for layer in cache.layers]


EQUAL = [[3.0, 3.0]] * LAYERS


@each
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_bits_differ_and_add_up(model: Any, method: str, backend: str) -> None:
    """Packed tokens take as many bytes as with equal bits, and no layer is dense after the prompt."""
    cache, equal = (cache_of(model, method, backend=backend, bits_by_layer=auto) for auto in ("auto", None))
    for one in (cache, equal):
        feed(model, one, 200)
    assert bits(equal) == EQUAL
    assert len({tuple(pair) for pair in bits(cache)}) > 1
    assert {layer.packed_tokens for layer in cache.layers} == {160}
    found, wanted = (one.memory_report().packed_bits_per_number for one in (cache, equal))
    assert wanted - 0.5 / LAYERS < found <= wanted
    before = bits(cache)
    feed(model, cache, 1, 150, 1)
    assert bits(cache) == before


@each
def test_short_prompts_wait(model: Any, method: str) -> None:
    """Bits are chosen in the step that has twice the tokens of a prompt; queries of the steps before it are used."""
    cache = cache_of(model, method)
    feed(model, cache, 20)
    queries, number = [], 0
    while not cache.packed_tokens:
        layer = cache.layers[0]
        assert layer.sides["keys"].tail.tokens <= 2 * LEAST + layer.flush_tokens
        queries.append(len(layer.storage.watch.kept))
        feed(model, cache, 1, seed=(number := number + 1))
    assert bits(cache) != EQUAL
    assert cache.get_seq_length() > 2 * LEAST
    assert max(queries) > 2 * LEAST // 3


@each
def test_operations(model: Any, method: str, tmp_path: Path) -> None:
    """Saved and copied caches keep their bits and go on bit for bit; an emptied cache chooses anew."""
    cache = cache_of(model, method)
    feed(model, cache, 200)
    chosen = bits(cache)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model.config)
    twin = copy.deepcopy(cache)
    assert bits(loaded) == bits(twin) == chosen
    first, *others = [feed(model, one, 1, 150, seed=1) for one in (cache, loaded, twin)]
    assert all(torch.equal(one, first) for one in others)
    cache.crop(-int(cache.get_seq_length()) + 100)
    feed(model, cache, 150)
    assert bits(cache) == chosen
    cache.reset()
    feed(model, cache, 20)
    assert bits(cache) == EQUAL
    feed(model, cache, 200)
    assert bits(cache) != EQUAL


@pytest.mark.parametrize("equalize", ["auto", "off"])
def test_long_after_loading(model: Any, tmp_path: Path, equalize: str) -> None:
    keys = {**METHODS["turboquant"], "equalize": equalize}
    cache = cache_of(model, "turboquant", keys=keys)
    feed(model, cache, 200)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model.config)
    for number in range(300):
        one, other = (feed(model, each, 1, seed=number) for each in (cache, loaded))
        assert torch.equal(one, other)


@pytest.mark.parametrize(("side", "method"), [("keys", "turboquant"), ("values", "spectral")])
def test_fractional_bits(model: Any, method: str, side: str) -> None:
    """Bits of two channel sets become whole ones, or stay as they are in later eras."""
    for auto in ("auto", None):
        cache = cache_of(model, method, **{side: {"method": "turboquant", "bits": 2.5}}, bits_by_layer=auto)
        feed(model, cache, 200, 150, 150)
        assert cache.packed_tokens > 300


def test_no_era_of_the_first_prompt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_compress.storage.side.renewed", lambda *args: pytest.fail("measured again"))
    feed(model, cache_of(model, "turboquant"), 200)


def test_another_batch_after_a_crop_to_nothing(model: Any) -> None:
    cache = cache_of(model, "spectral")
    feed(model, cache, 200)
    cache.crop(-200)
    ids = torch.randint(0, 64, (3, 200), generator=torch.Generator().manual_seed(0))
    model(ids, **with_cache(cache))
    assert cache.packed_tokens == 160
    fresh = cache_of(model, "spectral")
    model(ids, **with_cache(fresh))
    assert bits(cache) == bits(fresh) != EQUAL


@each
def test_without_queries(model: Any, method: str) -> None:
    disable_fused_attention(model)
    try:
        cache = cache_of(model, method)
        feed(model, cache, 200, 1)
    finally:
        enable_fused_attention(model)
    assert bits(cache) == EQUAL
    assert cache.packed_tokens == 160


def test_each_layer_is_packed_before_the_next(model: Any) -> None:
    """Nothing stays dense until other layers are measured."""
    cache, other = cache_of(model, "spectral"), cache_of(model, "spectral", offloading=True)
    packed = []

    def look(*args: Any) -> None:
        packed.append([layer.packed_tokens for layer in cache.layers[:2]])

    hook = model.model.layers[1].register_forward_pre_hook(look)
    feed(model, cache, 200)
    hook.remove()
    feed(model, other, 200)
    assert packed == [[160, 0]]
    assert bits(cache) == bits(other) != EQUAL


@pytest.mark.parametrize("way", ["step", "crop", "save"])
def test_a_forward_that_fails(model: Any, way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Layers before the one that failed have chosen, and go on."""
    cache = cache_of(model, "spectral")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[-1], "forward", fail)
        with pytest.raises(RuntimeError, match="memory"):
            feed(model, cache, 200)
    first = cache.layers[0]
    assert first.packed_tokens == 160
    if way == "save":
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model.config)
        assert [layer.packed_tokens for layer in loaded.layers] == [160] * (LAYERS - 1) + [0]
    elif way == "crop":
        for layer in cache.layers:
            layer.crop(-int(layer.get_seq_length()))
        feed(model, cache, 200)
        assert cache.packed_tokens == 160
    else:
        for layer in cache.layers[:-1]:
            layer.update(*(torch.randn(2, 2, 1, 32) for _ in range(2)))
        assert first.get_seq_length() == 201


def test_layers_with_bits_of_their_own_keep_them(model: Any) -> None:
    """Whatever comes first, the others share what the config gives them."""
    rule = {"keys": {**METHODS["spectral"], "bits": 1}, "values": {"method": "turboquant", "bits": 6}}
    for layer in (0, LAYERS - 1):
        cache = cache_of(model, "spectral", layers=[rule | {"match": [layer]}])
        equal = cache_of(model, "spectral", layers=[rule | {"match": [layer]}], bits_by_layer=None)
        for one in (cache, equal):
            feed(model, one, 200)
        assert bits(cache)[layer] == [1, 6]
        found, wanted = (one.memory_report().packed_bits_per_number for one in (cache, equal))
        assert wanted - 0.5 / LAYERS < found <= wanted


def test_static_caches_keep_their_bits(model: Any) -> None:
    cache = cache_of(model, "turboquant", max_cache_len=300)
    feed(model, cache, 200)
    assert bits(cache) == EQUAL


def test_no_effect_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="bits_by_layer"):
        CompressedCache(model.config, {"keys": "kivi", "values": "kivi", "bits_by_layer": "auto"})


def test_layers_without_bits_take_no_part(model: Any) -> None:
    rule = {"match": [0], "values": {"method": "kivi", "bits": 4, "group_size": 16}}
    cache = cache_of(model, "spectral", layers=[rule])
    feed(model, cache, 200)
    assert bits(cache)[0] == [3, 4]
    assert cache.layers[0].budget is None
    assert bits(cache)[1:] != EQUAL[1:]
