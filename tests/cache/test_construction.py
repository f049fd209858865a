"""Caches from arguments of one method, from configs of equal models, and moved between such models."""

from pathlib import Path

import pytest
import torch
from support.cache_name import feed
from support.models.small_model import VOCAB, method_config, small_config, small_model, statistics
from support.recorded_paths import record_paths

from kvcache_compress import (
    CompressedCache,
    PolarQuantCache,
    SpectralCache,
    TurboQuantCache,
    enable_fused_attention,
)
from kvcache_compress.config import get_method, method_names


@pytest.mark.parametrize("method", method_names())
def test_help_lists_every_option(method: str) -> None:
    options = get_method(method).Options
    assert all(option in str(options.__doc__) for option in options.model_fields)


def test_paths_and_none() -> None:
    config, file = small_config(), Path(statistics())
    assert SpectralCache(config, statistics=file).compression == SpectralCache(config, statistics=str(file)).compression
    assert TurboQuantCache(config, bits=3, key_bits=None).compression == TurboQuantCache(config, bits=3).compression


def test_values_of_wrong_types() -> None:
    for kind in (SpectralCache, PolarQuantCache):
        with pytest.raises(ValueError, match="values=3"):
            kind(small_config(), values=3)
    with pytest.raises(ValueError, match="variant='x'"):
        PolarQuantCache(small_config(), variant="x")


def test_options_that_no_cache_has() -> None:
    with pytest.raises(ValueError, match="unknown key 'window' for turboquant"):
        TurboQuantCache(small_config(), window=4)
    for name in ("keys", "values", "method"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            TurboQuantCache(small_config(), **{name: "none"})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("capacity", [None, 100])
@torch.no_grad()
def test_from_a_model_that_is_fused_to_one_that_is_not(capacity: int | None, attention: str) -> None:
    """A cache moved between two equal models, of which one is fused, gives both the same results."""
    fused, plain = (small_model(attn_implementation=attention) for _ in range(2))
    enable_fused_attention(fused)
    ids = torch.randint(1, VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))
    config, sizes = {**method_config("turboquant"), "max_cache_len": capacity}, [60, 1, 1, 1, 1]
    expected = feed(plain, CompressedCache(plain.config, config), ids, sizes)
    cache = CompressedCache(fused.config, config)
    logits = [feed(fused, cache, ids[:, :61], [60, 1]), feed(plain, cache, ids[:, 61:62])]
    with record_paths() as taken:
        logits.append(feed(fused, cache, ids[:, 62:], [1, 1]))
    assert cache.packed_tokens > 0
    assert "decode" not in {call.path for call in taken}
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=0)
    assert torch.equal(feed(plain, CompressedCache(fused.config, config), ids, sizes), expected)
