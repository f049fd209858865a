"""Statistics of codes: codebooks of one prompt (`codebook: online`), and factors of keys with outlier channels."""

from typing import Any

import pytest
import torch
from outlier_model import with_outlier_channels
from support.cache_name import with_cache
from support.models.small_model import VOCAB, small_model
from support.oracle import TOLERANCE, assert_close_but_for_flips
from transformers import DynamicCache

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.codecs.transforms import equalization
from kvcache_compress.eval.caches.caches import preset_cache
from kvcache_compress.eval.caches.prefill import prefill
from kvcache_compress.storage.static import StaticStorage

_ONLINE = {"method": "polarquant_recursive", "bits": [4, 2], "codebook": "online"}
ONLINE: dict[str, Any] = {
    "keys": {**_ONLINE, "center": "on", "radius_bits": 16}, "values": {**_ONLINE, "precondition": False},
    "sink_tokens": 4, "recent_tokens": 8, "backend": "torch",
}  # fmt: skip
capacities = pytest.mark.parametrize("capacity", [None, 120])


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model: Any, cache: CompressedCache, ids: torch.Tensor, step: int) -> torch.Tensor:
    return torch.cat([model(input_ids=part, **with_cache(cache)).logits for part in ids.split(step, 1)], 1)


@capacities
@pytest.mark.parametrize("prompt", [3, 70])
def test_several_prompts_are_refused(prompt: int, capacity: int | None) -> None:
    """A batch of several prompts is refused at its first tokens, packed or not; the cache then accepts one prompt."""
    model, ids = small_model(), tokens(2, prompt)
    cache, alone = (CompressedCache(model.config, {**ONLINE, "max_cache_len": capacity}) for _ in range(2))
    for _ in range(3):  # no layer may accept later what it refused at first
        with pytest.raises(ValueError, match=r"codebook='online' for keys of polarquant_recursive .*got 2 prompts"):
            feed(model, cache, ids, prompt)
        assert int(cache.get_seq_length()) == 0
    assert torch.equal(feed(model, cache, ids[:1], prompt), feed(model, alone, ids[:1], prompt))


@capacities
@pytest.mark.parametrize(("prompt", "early", "fused"), [(2, False, True), (20, True, True), (70, False, False)])
def test_rows_of_one_prompt_are_as_alone(prompt: int, early: bool, fused: bool, capacity: int | None) -> None:
    model, ids = small_model(), torch.cat([tokens(1, prompt).repeat(3, 1), tokens(3, 49, 1)], 1)
    if fused:
        enable_fused_attention(model)
    alone = []
    for row in ids:
        cache = CompressedCache(model.config, {**ONLINE, "max_cache_len": capacity})
        feed(model, cache, row[None, :prompt], prompt)
        alone.append(feed(model, cache, row[None, prompt:], 7))
    cache, order = CompressedCache(model.config, {**ONLINE, "max_cache_len": capacity}), [2, 0, 1]
    feed(model, cache, ids[: 3 if early else 1, :prompt], prompt)
    if not early:
        cache.batch_repeat_interleave(3)
    got = feed(model, cache, ids[order, prompt:], 7)
    assert cache.packed_tokens > 0
    torch.testing.assert_close(got, torch.cat([alone[row] for row in order]), **TOLERANCE)


PROMPT, CAPACITY = 400, 480
METHODS = {
    "turboquant": {"method": "turboquant", "bits": 2},
    "qjl": {"method": "qjl"},
    "recursive": {"method": "polarquant_recursive", "radius_bits": 8},
}
IDS = torch.randint(0, VOCAB, (1, 440), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def hard() -> Any:
    model = with_outlier_channels(small_model())
    enable_fused_attention(model)
    return model


@pytest.fixture(params=METHODS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"keys": METHODS[request.param], "values": "none", "sink_tokens": 4, "recent_tokens": 8}


@torch.no_grad()
def logits(model: Any, cache: Any, prompt: int = PROMPT, tokens: int = 40) -> torch.Tensor:
    """Logits of the tokens after the prompt, step by step and then as a chunk, `[tokens, V]`."""
    model(IDS[:, :prompt], **with_cache(cache))
    chunk, stop = prompt + tokens // 4, prompt + tokens
    steps = [model(IDS[:, at : at + 1], **with_cache(cache)).logits for at in range(prompt, chunk)]
    rest: torch.Tensor = model(IDS[:, chunk:stop], **with_cache(cache)).logits
    return torch.cat([*steps, rest], 1)[0]


def loss(model: Any, config: dict[str, Any]) -> float:
    cache = CompressedCache(model.config, config)
    exact = logits(model, DynamicCache(config=model.config))
    found = (logits(model, cache) - exact).square().mean().item()
    assert cache.packed_tokens > 300
    return found


def test_loss(config: dict[str, Any], hard: Any) -> None:
    plain = small_model()
    enable_fused_attention(plain)
    off = {**config, "keys": {**config["keys"], "equalize": "off"}}
    assert loss(hard, config) < 2 * loss(plain, config)
    assert loss(hard, off) > 4 * loss(plain, config)


def test_backends(config: dict[str, Any], hard: Any) -> None:
    found = []
    for backend in ("torch", "cpp", "triton"):
        cache = CompressedCache(hard.config, {**config, "backend": backend})
        found.append(logits(hard, cache, prompt=100, tokens=8))
        assert "factors" in cache.layers[0].sides["keys"].codec.statistics
    for other in found[1:]:
        assert_close_but_for_flips(other, found[0])


@pytest.mark.parametrize("shapes", ["as_growing", "static_shapes"])
def test_static(config: dict[str, Any], hard: Any, shapes: str, request: pytest.FixtureRequest) -> None:
    if shapes == "static_shapes":
        request.getfixturevalue(shapes)
    config["backend"] = "torch"
    cache = CompressedCache(hard.config, {**config, "max_cache_len": CAPACITY})
    found = logits(hard, cache)
    assert isinstance(cache.layers[0].storage, StaticStorage) == (shapes == "static_shapes")
    assert_close_but_for_flips(found, logits(hard, CompressedCache(hard.config, config)))


def test_evaluation_shows_the_queries(config: dict[str, Any]) -> None:
    """A prompt that all caches share is run again for one whose keys turn out to have outliers."""
    model = with_outlier_channels(small_model())
    found = prefill(model, IDS[:, :PROMPT]).run(preset_cache(config, name="ours")).cache
    own = CompressedCache(model.config, config)
    enable_fused_attention(model)
    with torch.no_grad():
        model(IDS[:, :PROMPT], **with_cache(own))
    for ours, theirs in zip(found.layers, own.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


def test_keys_alone(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Without fused attention keys alone decide, at once: less is saved, but most of it, and that is said once."""
    equalization._warn_of_queries.cache_clear()
    model = with_outlier_channels(small_model())
    off = {**config, "keys": {**config["keys"], "equalize": "off"}}
    assert loss(model, config) < 0.5 * loss(model, off)
    assert caplog.text.count("this model's keys have outlier channels") == 1
