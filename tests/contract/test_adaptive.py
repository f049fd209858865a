"""Caches that adapt: several eras of statistics, and bits shared among layers; attention, sizes and operations."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.method_cases import make_codec
from support.models.small_model import small_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.codecs import base
from kvcache_compress.codecs.base import SIDES, Codec, Prompt
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.methods.spectral import prefill
from kvcache_compress.storage import side
from kvcache_compress.storage.adaptive import bit_budget, eras

METHODS: dict[str, dict[str, Any]] = {
    "spectral": {"method": "spectral", "bits": 3, "group": 32},
    "turboquant": {"method": "turboquant", "bits": 3, "center": "on"},
    "qjl": {"method": "qjl", "center": "on"},
}
LEAST = 64


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    found = small_model(2, vocab_size=64, hidden_size=128, num_attention_heads=4)
    enable_fused_attention(found)
    return found


@pytest.fixture
def one_era() -> None:
    """The other contract tests' fixture, not wanted here."""


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "LEAST_TOKENS", LEAST)
    monkeypatch.setattr(prefill, "LEAST_LATER", LEAST)
    monkeypatch.setattr(base, "LEAST_IN_STEPS", 2 * LEAST)
    monkeypatch.setattr(bit_budget, "HALF_SURE", 1)
    with torch.no_grad():
        yield


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement begins an era."""

    def renewed(codec: Codec, prompt: Prompt) -> Codec:
        fresh = copy.copy(codec)
        fresh.observe(prompt)
        return fresh

    monkeypatch.setattr(side, "renewed", renewed)


def cache_of(model: Any, method: str, **options: Any) -> CompressedCache:
    config = {"keys": METHODS[method], "values": {"method": "turboquant", "bits": 3}}
    return CompressedCache(model.config, {**config, "sink_tokens": 4, "recent_tokens": 16, **options})


def feed(model: Any, cache: Any, *sizes: int, seed: int = 0) -> torch.Tensor:
    """Logits of the last of random chunks of these sizes; each chunk has tokens of its own kind."""
    generator = torch.Generator().manual_seed(seed)
    for number, size in enumerate(sizes):
        first = 32 * (number % 2)
        ids = torch.randint(first, first + 32, (2, size), generator=generator)
        logits = model(ids, **with_cache(cache)).logits
    return torch.as_tensor(logits)


def starts(cache: CompressedCache) -> list[int]:
    return [era.start for era in cache.layers[1].sides["keys"].eras]


def decoded(cache: CompressedCache, tokens: int | None = None) -> list[torch.Tensor]:
    return [x[:, :, :tokens].clone() for layer in cache.layers for x in (layer.keys, layer.values)]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_attention_over_eras(model: Any, method: str, backend: str, always: None) -> None:
    """A step attends to keys that each era's codec decodes, and those of an era stay as they were."""
    cache = cache_of(model, method, backend=backend)
    feed(model, cache, 200)
    before = decoded(cache, 160)
    feed(model, cache, 170, 150)
    assert len(starts(cache)) == 3
    assert equal(decoded(cache, 160), before)
    layer = cache.layers[1]
    keys, values = layer.views()
    query = torch.randn(2, 4, 3, 32, generator=torch.Generator().manual_seed(1))
    call = AttentionCall.of(query, scaling=0.3)
    count = keys.tokens
    seen = torch.ones(3, count, dtype=torch.bool).tril(count - 3)
    expected = scaled_dot_product_attention(
        query, keys.dense(), values.dense(), attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(keys.attend(call, values).transpose(1, 2), expected, atol=2e-4, rtol=0)
    assert all(one.codec is not other.codec for one, other in zip(keys.eras[1:], keys.eras, strict=False))


@pytest.mark.parametrize("method", METHODS)
def test_operations(model: Any, method: str, always: None, tmp_path: Path) -> None:
    """Saved, copied and reordered caches keep their eras and go on bit for bit; a crop drops those that it empties."""
    cache = cache_of(model, method)
    feed(model, cache, 200, 170)
    began = starts(cache)
    assert len(began) == 2
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model.config)
    twin = copy.deepcopy(cache)
    assert starts(loaded) == starts(twin) == began
    logits = [feed(model, one, 1, 150, seed=1) for one in (cache, loaded, twin)]
    assert equal(logits[1:], logits[:1] * 2)
    assert [len(starts(one)) for one in (cache, loaded, twin)] == [3, 3, 3]
    rows = decoded(twin)
    twin.reorder_cache(torch.tensor([1, 0]))
    assert equal(decoded(twin), [x.flip(0) for x in rows])
    kept = decoded(cache, 140)
    cache.crop(-int(cache.get_seq_length()) + 150)
    assert starts(cache) == began[:1]
    assert equal(decoded(cache, 128), [x[:, :, :128] for x in kept])
    feed(model, cache, 170)
    assert len(starts(cache)) == 2


def test_steps_begin_eras(model: Any, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated tokens are measured after waits that double, once enough wait dense, on queries kept until then."""
    monkeypatch.setattr("kvcache_compress.storage.dynamic.MOST_ERAS", 3)
    monkeypatch.setattr(eras, "FIRST_WAIT", 64)
    cache = cache_of(model, "spectral")
    feed(model, cache, 200)
    layer, counts, tails, kept = cache.layers[1], [], [], []
    for number in range(800):
        feed(model, cache, 1, seed=number)
        counts.append(len(starts(cache)))
        tails.append(layer.sides["keys"].tail.tokens)
        kept.append(len(layer.storage.watch.kept))
    assert counts[-1] == 3
    assert 2 * LEAST <= max(tails) <= 2 * LEAST + layer.flush_tokens
    assert starts(cache)[1] >= eras.FIRST_WAIT
    assert starts(cache)[2] - starts(cache)[1] >= 2 * eras.FIRST_WAIT
    assert max(kept) <= eras.KEPT_QUERIES
    assert not kept[-1], "a layer with the most eras measures no more"


class Kinds:
    """Prompts of two kinds, whose keys have unlike covariances."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.mixes = torch.randn(2, 2, 32, 32, generator=self.generator)

    def prompt(self, kind: int, tokens: int) -> Prompt:
        x = torch.randn(1, 2, tokens, 32, generator=self.generator) * torch.logspace(0, -2, 32) @ self.mixes[kind]
        query = torch.randn(1, 4, tokens, 32, generator=self.generator)
        return Prompt(x[:, :, :4], x[:, :, 4:], 16, queries=AttentionCall.of(query, scaling=0.2))

    @staticmethod
    def codec(*prompts: Prompt) -> Codec:
        """A codec that has observed these prompts."""
        codec: Any = make_codec("spectral", 32, heads=2, sinks=4, rope=None, bits=2, group=32)
        for prompt in prompts:
            codec.observe(prompt)
        return codec


def test_new_statistics_must_pay() -> None:
    kinds = Kinds()
    codec = kinds.codec(*(kinds.prompt(0, 1028) for _ in range(4)))
    assert eras.renewed(codec, kinds.prompt(0, 260)) is None
    assert eras.renewed(codec, kinds.prompt(1, 260)) is not None


def test_later_statistics_are_blended() -> None:
    """Few tokens add to the statistics before: of the same kind, these lose less than the few tokens' own."""
    kinds = Kinds()
    first, few, other = kinds.prompt(0, 1028), kinds.prompt(0, 132), kinds.prompt(1, 132)
    long, alone, blended = kinds.codec(first), kinds.codec(few), kinds.codec(first, few)
    before, own, both = eras._losses([long, alone, blended], kinds.prompt(0, 1028), 0)
    assert both < 1.1 * before
    assert own > 1.5 * before
    old, new = eras._losses([long, kinds.codec(first, other)], kinds.prompt(1, 1028), 0)
    assert new < 0.2 * old


def test_queries_that_were_not_seen_are_no_prior() -> None:
    kinds = Kinds()
    unseen, then = replace(kinds.prompt(0, 1028), queries=None), kinds.prompt(0, 516)
    assert then.queries is not None
    query = then.queries.query * 0.05 * torch.logspace(0, -2, 32)
    then = replace(then, queries=replace(then.queries, query=query))
    blind, own, both = eras._losses([kinds.codec(unseen), kinds.codec(then), kinds.codec(unseen, then)], then, 0)
    assert both < 1.1 * own < 0.5 * blind


LAYERS = 4
each = pytest.mark.parametrize("method", ["spectral", "turboquant"])


@pytest.fixture(scope="module")
def unlike() -> LlamaForCausalLM:
    """A model whose layers need unlike bits, because their queries and outputs are of unlike sizes."""
    found = small_model(LAYERS, vocab_size=64, hidden_size=128, num_attention_heads=4)
    for number, layer in enumerate(found.model.layers):
        layer.self_attn.q_proj.weight.data *= 8 ** (number % 2)
    enable_fused_attention(found)
    return found


budgeted = partial(cache_of, bits_by_layer="auto")


def bits(cache: Any) -> list[list[float]]:
    return [[layer.sides[side].codec.options.bits for side in SIDES] for layer in cache.layers]


EQUAL = [[3.0, 3.0]] * LAYERS


@each
@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_bits_differ_and_add_up(unlike: Any, method: str, backend: str) -> None:
    """Packed tokens take as many bytes as with equal bits, and no layer is dense after the prompt."""
    cache, equal = (budgeted(unlike, method, backend=backend, bits_by_layer=auto) for auto in ("auto", None))
    for one in (cache, equal):
        feed(unlike, one, 200)
    assert bits(equal) == EQUAL
    assert len({tuple(pair) for pair in bits(cache)}) > 1
    assert {layer.packed_tokens for layer in cache.layers} == {160}
    found, wanted = (one.memory_report().packed_bits_per_number for one in (cache, equal))
    assert wanted - 0.5 / LAYERS < found <= wanted
    before = bits(cache)
    feed(unlike, cache, 1, 150, 1)
    assert bits(cache) == before


@each
def test_short_prompts_wait(unlike: Any, method: str) -> None:
    """Bits are chosen in the step that has twice the tokens of a prompt; queries of the steps before it are used."""
    cache = budgeted(unlike, method)
    feed(unlike, cache, 20)
    queries, number = [], 0
    while not cache.packed_tokens:
        layer = cache.layers[0]
        assert layer.sides["keys"].tail.tokens <= 2 * LEAST + layer.flush_tokens
        queries.append(len(layer.storage.watch.kept))
        feed(unlike, cache, 1, seed=(number := number + 1))
    assert bits(cache) != EQUAL
    assert cache.get_seq_length() > 2 * LEAST
    assert max(queries) > 2 * LEAST // 3


@each
def test_operations_keep_bits(unlike: Any, method: str, tmp_path: Path) -> None:
    """Saved and copied caches keep their bits and go on bit for bit; an emptied cache chooses anew."""
    cache = budgeted(unlike, method)
    feed(unlike, cache, 200)
    chosen = bits(cache)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", unlike.config)
    twin = copy.deepcopy(cache)
    assert bits(loaded) == bits(twin) == chosen
    first, *others = [feed(unlike, one, 1, 150, seed=1) for one in (cache, loaded, twin)]
    assert all(torch.equal(one, first) for one in others)
    cache.crop(-int(cache.get_seq_length()) + 100)
    feed(unlike, cache, 150)
    assert bits(cache) == chosen
    cache.reset()
    feed(unlike, cache, 20)
    assert bits(cache) == EQUAL
    feed(unlike, cache, 200)
    assert bits(cache) != EQUAL


@pytest.mark.parametrize("equalize", ["auto", "off"])
def test_long_after_loading(unlike: Any, tmp_path: Path, equalize: str) -> None:
    keys = {**METHODS["turboquant"], "equalize": equalize}
    cache = budgeted(unlike, "turboquant", keys=keys)
    feed(unlike, cache, 200)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", unlike.config)
    for number in range(300):
        one, other = (feed(unlike, each, 1, seed=number) for each in (cache, loaded))
        assert torch.equal(one, other)


@pytest.mark.parametrize(("side", "method"), [("keys", "turboquant"), ("values", "spectral")])
def test_fractional_bits(unlike: Any, method: str, side: str) -> None:
    """Bits of two channel sets become whole ones, or stay as they are in later eras."""
    for auto in ("auto", None):
        cache = budgeted(unlike, method, **{side: {"method": "turboquant", "bits": 2.5}}, bits_by_layer=auto)
        feed(unlike, cache, 200, 150, 150)
        assert cache.packed_tokens > 300


def test_no_era_of_the_first_prompt(unlike: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_compress.storage.side.renewed", lambda *args: pytest.fail("measured again"))
    feed(unlike, budgeted(unlike, "turboquant"), 200)


def test_another_batch_after_a_crop_to_nothing(unlike: Any) -> None:
    cache = budgeted(unlike, "spectral")
    feed(unlike, cache, 200)
    cache.crop(-200)
    ids = torch.randint(0, 64, (3, 200), generator=torch.Generator().manual_seed(0))
    unlike(ids, **with_cache(cache))
    assert cache.packed_tokens == 160
    fresh = budgeted(unlike, "spectral")
    unlike(ids, **with_cache(fresh))
    assert bits(cache) == bits(fresh) != EQUAL


@each
def test_without_queries(unlike: Any, method: str) -> None:
    disable_fused_attention(unlike)
    try:
        cache = budgeted(unlike, method)
        feed(unlike, cache, 200, 1)
    finally:
        enable_fused_attention(unlike)
    assert bits(cache) == EQUAL
    assert cache.packed_tokens == 160


def test_each_layer_is_packed_before_the_next(unlike: Any) -> None:
    """Nothing stays dense until other layers are measured."""
    cache, other = budgeted(unlike, "spectral"), budgeted(unlike, "spectral", offloading=True)
    packed = []

    def look(*args: Any) -> None:
        packed.append([layer.packed_tokens for layer in cache.layers[:2]])

    hook = unlike.model.layers[1].register_forward_pre_hook(look)
    feed(unlike, cache, 200)
    hook.remove()
    feed(unlike, other, 200)
    assert packed == [[160, 0]]
    assert bits(cache) == bits(other) != EQUAL


@pytest.mark.parametrize("way", ["step", "crop", "save"])
def test_a_forward_that_fails(unlike: Any, way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Layers before the one that failed have chosen, and go on."""
    cache = budgeted(unlike, "spectral")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(unlike.model.layers[-1], "forward", fail)
        with pytest.raises(RuntimeError, match="memory"):
            feed(unlike, cache, 200)
    first = cache.layers[0]
    assert first.packed_tokens == 160
    if way == "save":
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", unlike.config)
        assert [layer.packed_tokens for layer in loaded.layers] == [160] * (LAYERS - 1) + [0]
    elif way == "crop":
        for layer in cache.layers:
            layer.crop(-int(layer.get_seq_length()))
        feed(unlike, cache, 200)
        assert cache.packed_tokens == 160
    else:
        for layer in cache.layers[:-1]:
            layer.update(*(torch.randn(2, 2, 1, 32) for _ in range(2)))
        assert first.get_seq_length() == 201


def test_layers_with_bits_of_their_own_keep_them(unlike: Any) -> None:
    """Whatever comes first, the others share what the config gives them."""
    rule = {"keys": {**METHODS["spectral"], "bits": 1}, "values": {"method": "turboquant", "bits": 6}}
    for layer in (0, LAYERS - 1):
        cache = budgeted(unlike, "spectral", layers=[rule | {"match": [layer]}])
        equal = budgeted(unlike, "spectral", layers=[rule | {"match": [layer]}], bits_by_layer=None)
        for one in (cache, equal):
            feed(unlike, one, 200)
        assert bits(cache)[layer] == [1, 6]
        found, wanted = (one.memory_report().packed_bits_per_number for one in (cache, equal))
        assert wanted - 0.5 / LAYERS < found <= wanted


def test_static_caches_keep_their_bits(unlike: Any) -> None:
    cache = budgeted(unlike, "turboquant", max_cache_len=300)
    feed(unlike, cache, 200)
    assert bits(cache) == EQUAL


def test_no_effect_is_refused(unlike: Any) -> None:
    with pytest.raises(ValueError, match="bits_by_layer"):
        CompressedCache(unlike.config, {"keys": "kivi", "values": "kivi", "bits_by_layer": "auto"})


def test_layers_without_bits_take_no_part(unlike: Any) -> None:
    rule = {"match": [0], "values": {"method": "kivi", "bits": 4, "group_size": 16}}
    cache = budgeted(unlike, "spectral", layers=[rule])
    feed(unlike, cache, 200)
    assert bits(cache)[0] == [3, 4]
    assert cache.layers[0].budget is None
    assert bits(cache)[1:] != EQUAL[1:]
