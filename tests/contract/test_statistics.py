"""Statistics of codes: factors of keys with outlier channels."""

from typing import Any

import pytest
import torch
from outlier_model import with_outlier_channels
from support.cache_name import feed
from support.models.small_model import VOCAB, small_model
from support.oracle import assert_close_but_for_flips
from transformers import DynamicCache

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.codecs.transforms import equalization

PROMPT = 400
METHODS = {
    "turboquant": {"method": "turboquant", "bits": 2},
    "qjl": {"method": "qjl"},
    "recursive": {"method": "polarquant_recursive", "radius_bits": 8},
}
MORE = {
    "fractional": {"method": "turboquant", "bits": 2.5},
    "prod": {"method": "turboquant", "bits": 3, "estimator": "prod"},
    "levels": {"method": "polarquant_recursive", "bits": [4, 3, 2], "levels": 3},
}
IDS = torch.randint(0, VOCAB, (1, 440), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def hard() -> Any:
    model = with_outlier_channels(small_model())
    enable_fused_attention(model)
    return model


@pytest.fixture(params=METHODS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"keys": {**METHODS, **MORE}[request.param], "values": "none", "sink_tokens": 4, "recent_tokens": 8}


@torch.no_grad()
def logits(model: Any, cache: Any, prompt: int = PROMPT, tokens: int = 40) -> torch.Tensor:
    """Logits of the tokens after the prompt, step by step and then as a chunk, `[tokens, V]`."""
    sizes = [prompt, *[1] * (tokens // 4), tokens - tokens // 4]
    return feed(model, cache, IDS[:, : prompt + tokens], sizes)[0, prompt:]


def loss(model: Any, config: dict[str, Any]) -> float:
    cache = CompressedCache(model.config, config)
    exact = logits(model, DynamicCache(config=model.config))
    found = (logits(model, cache) - exact).square().mean().item()
    assert cache.packed_tokens > 300
    return found


@pytest.mark.parametrize("config", [*METHODS, *MORE], indirect=True)
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


def test_keys_alone(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Without fused attention keys alone decide, at once: less is saved, but most of it, and that is said once."""
    equalization._warn_once.cache_clear()
    model = with_outlier_channels(small_model())
    off = {**config, "keys": {**config["keys"], "equalize": "off"}}
    assert loss(model, config) < 0.5 * loss(model, off)
    assert caplog.text.count("this model's keys have outlier channels") == 1
