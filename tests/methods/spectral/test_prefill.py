"""Statistics of spectral keys from the first prompt: the tokens and queries that count, and when packing waits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.files.spectral_files import statistics_file
from support.method_cases import half_layout, make_codec
from support.models import family_cases
from support.models.small_model import small_model
from transformers import DynamicCache

from kvcache_compress import CompressedCache, SpectralCache, disable_fused_attention, enable_fused_attention
from kvcache_compress.codecs.base import Prompt
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.codecs.quantizers.digits import allocate_bits
from kvcache_compress.methods.spectral import moments, prefill
from kvcache_compress.methods.spectral.codec import SpectralCodec, SpectralOptions
from kvcache_compress.storage.view import View

GROUP, DIM, HEADS = 32, 32, 2
WINDOWS = {"sink_tokens": 4, "recent_tokens": 8}


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    """Let each test see the warnings that are given once."""
    prefill._warn_once.cache_clear()


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    made = small_model()
    enable_fused_attention(made)
    with torch.no_grad():
        yield made


def ids(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def spectral(model: Any, **options: Any) -> SpectralCache:
    return SpectralCache(model.config, **{"bits": 3, "group": GROUP, **WINDOWS, **options})


def statistics(cache: Any, layer: int = 0) -> dict[str, torch.Tensor]:
    return cache.layers[layer].sides["keys"].codec.statistics  # type: ignore[no-any-return]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())


def codec(bits: float = 3.0, heads: int = HEADS) -> Any:
    return make_codec("spectral", DIM, heads=heads, sinks=4, bits=bits, group=GROUP)


def prompt(tokens: int = 300, queries: int | None = None, batch: int = 2) -> Prompt:
    """A prompt of random keys, 4 of them sinks, and of the last queries, of 2 query heads per key head."""
    generator = torch.Generator().manual_seed(0)
    layout, spread = half_layout(DIM), torch.logspace(0, -1, DIM)
    angles = torch.arange(max(tokens, GROUP))[:, None] * 10_000 ** -(torch.arange(layout.rotary) / layout.rotary)
    places = angles.cos()[None, :GROUP], angles.sin()[None, :GROUP]
    rope = angles[:tokens].cos().expand(batch, -1, -1), angles[:tokens].sin().expand(batch, -1, -1)
    keys = layout.rotate(torch.randn(batch, HEADS, tokens, DIM, generator=generator) * spread, rope)
    query = torch.randn(batch, 2 * HEADS, queries or tokens, DIM, generator=generator)
    return Prompt(
        keys[:, :, :4], keys[:, :, 4:], 8, (rope[0][:, 4::GROUP], rope[1][:, 4::GROUP]), places,
        AttentionCall.of(query, scaling=DIM**-0.5),
    )  # fmt: skip


def measured(prompt: Prompt) -> dict[str, torch.Tensor]:
    one = codec()
    one.observe(prompt)
    return one.statistics


def causal(tokens: int, queries: int) -> torch.Tensor:
    return torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)[None, None]


def test_moments_follow_from_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and queries turned back to their group's first token, weighted by p (1 - p), one query at a time."""
    found: list[Any] = []
    monkeypatch.setattr(prefill, "shrunk", lambda sums: found.append(sums.means()) or sums.means())
    given, layout = prompt(100, batch=1), half_layout(DIM)
    assert given.queries is not None
    statistics = measured(given)
    angles = torch.arange(100.0)[:, None] * 10_000 ** -(torch.arange(layout.rotary) / layout.rotary)

    def turned(x: torch.Tensor, by: int) -> torch.Tensor:
        """Vectors `[..., D]` turned back by the rotation of a position."""
        rope = angles[by : by + 1].cos()[None], angles[by : by + 1].sin()[None]
        return layout.unrotate(x[None], rope)[0]

    table = statistics["places"].float() @ statistics["means"].float()
    keys, query = torch.cat([given.sinks, given.keys], 2)[0], given.queries.query[0]
    for head in range(HEADS):
        of_keys, plain, of_queries, weight = *torch.zeros(3, DIM, DIM), 0.0
        x = torch.cat([turned(keys[head : head + 1, 4 + g : 4 + g + GROUP], 4 + g)[0] for g in range(0, 96, GROUP)])
        x = x - table[head].repeat(3, 1)
        plain = x.mT @ x / 96
        for at in range(12, 100):
            for q in query[2 * head : 2 * head + 2, at]:
                p = (keys[head, : at + 1] @ q * DIM**-0.5).softmax(-1)
                cost = torch.zeros(96)
                cost[: at + 1 - 4 - 8] = (p * (1 - p))[4 : at + 1 - 8]
                of_keys, weight = of_keys + (x * cost[:, None]).mT @ x, weight + cost.sum()
                for g in range(0, 96, GROUP):
                    y = turned(q[None, None], 4 + g)[0]
                    of_queries = of_queries + cost[g : g + GROUP].sum() * y.mT @ y
        for ours, theirs in zip(found[0], (of_keys / weight, plain, of_queries / weight), strict=True):
            assert (ours[head] - theirs).norm() < 1e-3 * theirs.norm()


def test_long_prompts_are_measured_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, heads and queries that are too many for one tensor are summed up bit by bit."""
    whole = measured(prompt())
    monkeypatch.setattr(moments, "RUN_NUMBERS", 2000)
    for name, x in measured(prompt()).items():
        assert (x.abs() - whole[name].abs()).abs().max() < 2e-3 * whole[name].abs().max(), name


@pytest.mark.parametrize("unread", [False, True], ids=["attended", "a head whose packed keys are not"])
def test_heads_do_not_depend_on_each_other(unread: bool) -> None:
    """A tensor-parallel process that holds a head codes and scores it as one that holds all heads does."""
    given = prompt()
    queries = given.queries
    assert queries is not None
    if unread:  # queries of the first head see a sink alone
        given.sinks[:, 0, 0] = 1000 * given.sinks[:, 0, 0]
        queries.query[:, :2] = given.sinks[:, :1, :1]
    whole = codec()
    whole.observe(given)
    keys = given.keys[:, :, : 9 * GROUP]
    rope = given.rope[0][:, :9], given.rope[1][:, :9]  # type: ignore[index]
    codes = whole.encode(keys, rope)
    scores = whole.score(queries.query[:, ::2], codes, rope)
    for head in range(HEADS):
        own, one = slice(head, head + 1), codec(heads=1)
        seen = replace(queries, query=queries.query[:, 2 * head : 2 * head + 2])
        one.observe(replace(given, sinks=given.sinks[:, own], keys=given.keys[:, own], queries=seen))
        mine = one.encode(keys[:, own], rope)
        for ours, theirs in zip(mine, codes, strict=True):
            assert torch.equal(ours, theirs[:, own])
        torch.testing.assert_close(one.score(queries.query[:, ::2][:, own], mine, rope), scores[:, own])


@pytest.mark.parametrize("queries", [300, 40, 1])
def test_masks_of_every_kind(queries: int) -> None:
    """Boolean, additive and flash attention's masks mean the same, and none means causal attention."""
    plain = prompt(queries=queries)
    expected = measured(plain)
    seen, allowed = plain.queries, causal(300, queries)
    assert seen is not None
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, additive, additive.expand(2, 4, -1, -1), torch.ones(2, 300, dtype=torch.long)):
        assert same(measured(replace(plain, queries=replace(seen, mask=Mask(mask)))), expected)


def test_padding_counts_nowhere(model: Any) -> None:
    """Tokens that the mask hides change nothing, in batches whose rows have other positions."""
    tokens, mask = ids(300, 2), torch.ones(2, 300, dtype=torch.long)
    mask[0, :70] = 0
    found = []
    for padding in (0, 7):
        cache = spectral(model)
        padded = tokens.masked_fill(mask == 0, padding)
        model(padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), **with_cache(cache))
        found.append([statistics(cache, layer) for layer in (0, 1)])
        assert cache.packed_tokens > 100
    assert all(same(*pair) for pair in zip(*found, strict=True))


def test_soft_caps_and_learned_logits_count() -> None:
    plain = prompt()
    seen = plain.queries
    assert seen is not None
    expected = measured(plain)
    for change in ({"softcap": 0.5}, {"s_aux": torch.tensor([2.0, 3.0, 4.0, 5.0])}):
        assert not same(measured(replace(plain, queries=replace(seen, **change))), expected)


def test_few_tokens_get_even_bits() -> None:

    def spread(tokens: int) -> int:
        one = codec()
        one.observe(prompt(tokens))
        bits = allocate_bits(one.deviation, one.counts)
        return int(bits.max() - bits.min())

    assert spread(5) <= 2 < spread(600)


def test_without_fused_attention(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without fused attention statistics follow from keys alone, at once, which is said once."""
    tokens = ids(480, seed=7)

    def loss(keys: dict[str, Any]) -> float:
        cache = CompressedCache(model.config, {"keys": keys, "values": "none", **WINDOWS})
        model(tokens[:, :400], **with_cache(cache))
        assert cache.packed_tokens > 300
        exact = DynamicCache(config=model.config)
        model(tokens[:, :400], **with_cache(exact))
        logits = [model(tokens[:, 400:], **with_cache(one)).logits for one in (cache, exact)]
        return (logits[0] - logits[1]).square().mean().item()

    keys = {"method": "spectral", "bits": 2, "group": GROUP}
    losses = [loss(keys)]
    assert not caplog.text
    disable_fused_attention(model)
    losses += [loss(keys), loss(keys)]
    enable_fused_attention(model)
    assert caplog.text.count("Call enable_fused_attention(model)") == 1
    assert max(losses) < loss({"method": "turboquant", "bits": 2, "codebook": "lloyd_max", "scalar": "norm"})


def test_handles_without_attention(model: Any) -> None:
    """If the queries of a prompt are never shown, the next update measures statistics on keys alone."""
    cache, x = spectral(model), torch.randn(1, HEADS, 400, DIM)
    key, value = cache.update(x, x, 0)
    assert isinstance(key, View)
    assert torch.equal(key.dense(), x)
    assert torch.equal(value.dense(), x)
    assert cache.packed_tokens == 0
    cache.update(x[:, :, :1], x[:, :, :1], 0)
    assert cache.packed_tokens == 384


@pytest.mark.parametrize(("first", "capacity"), [(1, None), (16, 500), (40, None)])
def test_prompts_that_fit_the_sinks(first: int, capacity: int | None, model: Any) -> None:
    """After a first prompt of sinks alone, or little more, keys of later tokens are as good as TurboQuant's."""
    losses = []
    for method in ("spectral", "turboquant"):
        side = {"method": method, "bits": 4}
        options = {} if capacity is None else {"max_cache_len": capacity}
        cache = CompressedCache(
            model.config, {"keys": side, "values": {"method": "none"}, "sink_tokens": 16, "recent_tokens": 8, **options}
        )
        dense = DynamicCache(config=model.config)
        for part in ids(300).split([first, *[4] * ((300 - first) // 4), (300 - first) % 4], 1):
            if part.shape[1]:
                model(part, **with_cache(cache))
                model(part, **with_cache(dense))
        exact, found = dense.layers[0].keys, cache.layers[0].keys
        assert exact is not None
        assert found is not None
        losses.append(((found[:, :, :300] - exact).norm() / exact.norm()).item())
    assert losses[0] < 1.2 * losses[1], losses


def test_a_cache_goes_on_after_an_error_and_a_crop(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If measuring fails and the prompt is cropped away, later prompts are measured and packed as in a new cache."""
    cache = spectral(model)
    monkeypatch.setattr(prefill, "shrunk", lambda sums: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids(300), **with_cache(cache))
    monkeypatch.undo()
    cache.crop(-300)
    for part in (ids(5), ids(300)[:, 5:]):
        model(part, **with_cache(cache))
    assert cache.packed_tokens > 0
    assert statistics(cache)


def test_rope_of_unknown_kind_is_refused() -> None:
    config = family_cases.model("deepseek_v3").config
    with pytest.raises(ValueError, match="rotary position embeddings of an unknown kind"):
        CompressedCache(config, {"keys": "spectral", "values": "none"})


def test_sizes_need_no_file() -> None:
    """Constant bytes are those of a prepared codec, and of one with a file of the same group."""
    one = codec(2.0)
    one.observe(prompt())
    options = SpectralOptions(bits=2.0, group=GROUP)
    assert SpectralCodec.constant_size(options, "keys", DIM, HEADS) == one.constant_bytes()
    file = SpectralOptions(bits=2.0, statistics=statistics_file(DIM))
    assert SpectralCodec.constant_size(file, "keys", DIM, HEADS) == one.constant_bytes()
