"""Caches of one method: what `help` shows of them, and how arguments become the config of each side."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from support.models.small_model import small_config, statistics

import kvcache_compress
from kvcache_compress import (
    CompressedCache,
    CompressionConfig,
    KIVICache,
    PolarQuantCache,
    SpectralCache,
    TurboQuantCache,
)
from kvcache_compress.cache.by_method import MethodCache
from kvcache_compress.config import get_method

CLASSES = [each for name in kvcache_compress.__all__ if inspect.isclass(each := getattr(kvcache_compress, name))]
CLASSES = [each for each in CLASSES if issubclass(each, MethodCache)]


@pytest.mark.parametrize("kind", CLASSES)
def test_help_lists_every_option(kind: Any) -> None:
    for name in kind.names:
        text = inspect.cleandoc(get_method(name).Options.__doc__)
        assert text in kind.__doc__
        assert all(option in text for option in get_method(name).Options.model_fields)
    assert "sink_tokens, recent_tokens" in kind.__doc__


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


def test_turboquant_cache() -> None:
    cache = TurboQuantCache(small_config(), bits=3, value_bits=2, recent_tokens=32, scalar="norm", seed=5)
    expected = {"method": "turboquant", "scalar": "norm"}
    assert cache.compression == CompressionConfig(
        keys={**expected, "bits": 3}, values={**expected, "bits": 2}, recent_tokens=32, seed=5
    )
    assert CompressedCache(small_config(), cache.compression).compression == cache.compression


def test_kivi_cache() -> None:
    cache = KIVICache(small_config(), key_bits=4, group_size=32)
    assert cache.compression == CompressionConfig(
        keys={"method": "kivi", "bits": 4, "group_size": 32},
        values={"method": "kivi", "bits": 2, "group_size": 32},
        sink_tokens=0,
        recent_tokens=128,
    )


def test_options_that_no_cache_has() -> None:
    with pytest.raises(ValueError, match="unknown key 'window' for turboquant"):
        TurboQuantCache(small_config(), window=4)
    for name in ("keys", "values", "method"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            TurboQuantCache(small_config(), **{name: "none"})
