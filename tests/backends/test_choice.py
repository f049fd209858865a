"""Choice of a back end, also of one from outside the package: a class and its name in `BACKENDS` are enough."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.cache_name import feed
from support.models.small_model import VOCAB, method_config, small_config, small_model
from support.recorded_paths import record_paths

from kvcache_compress import CompressedCache, TurboQuantCache, enable_fused_attention
from kvcache_compress.backends import triton
from kvcache_compress.backends.choice import BACKENDS, resolve_backend
from kvcache_compress.backends.torch import TorchBackend
from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.methods.kivi import KIVICodec
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec


class EvenBits(TorchBackend):
    """Counts what a cache asks of it, and has kernels for even numbers of bits alone."""

    name = "even"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("encoded", "attend"):
            self.calls[name] += 1
        return super().__getattribute__(name)

    def supports(self, codec: type[Codec], options: Any, side: Side) -> bool:
        return options.bits % 2 == 0


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> EvenBits:
    """The back end, the first that `auto` asks."""
    backend = EvenBits()
    others = dict(BACKENDS)
    monkeypatch.setattr("kvcache_compress.backends.choice.BACKENDS", {"even": backend} | others)
    monkeypatch.setattr("kvcache_compress.config.BACKENDS", {"even": backend} | others)
    return backend


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_cache_runs_on_it(even: EvenBits, static: bool) -> None:
    model, ids = small_model(), torch.randint(1, VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))
    enable_fused_attention(model)
    logits = {}
    for name in ("torch", "even"):
        config = {**method_config("kivi"), "backend": name} | ({"max_cache_len": 100} if static else {})
        cache = CompressedCache(model.config, config)
        feed(model, cache, ids)
        with record_paths() as taken:
            logits[name] = feed(model, cache, ids[:, :40], [1] * 40)
        assert {path for path, _ in taken} == {name}
    torch.testing.assert_close(logits["even"], logits["torch"], atol=0, rtol=0)
    assert cache.packed_tokens > 60
    layers = len(cache.layers)
    assert even.calls["attend"] == 40 * layers
    assert even.calls["encoded"] == 2 * layers * (cache.packed_tokens // 32)


def test_options_decide(even: EvenBits) -> None:
    """A width without kernels falls back with `auto`, and is refused where the back end is asked for."""
    values = KIVICodec, KIVICodec.Options(bits=2), "values"
    found = {}
    for bits in (3, 4):
        keys = TurboQuantCodec, TurboQuantCodec.Options(bits=bits), "keys"
        found[bits] = resolve_backend("auto", torch.device("cpu"), (keys, values)).name
    assert found[4] == "even"
    assert found[3] != "even"
    config = {**method_config("turboquant"), "backend": "even"}
    with pytest.raises(ValueError, match="backend=\"even\" is unavailable for method 'turboquant'"):
        CompressedCache(small_model().config, config)


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match='backend="triton" is unavailable: triton is not installed'):
        TurboQuantCache(small_config(), backend="triton")
    TurboQuantCache(small_config(), backend="auto")


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match='backend="triton" is unavailable: there is no GPU'):
        TurboQuantCache(small_config(), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    TurboQuantCache(small_config(), backend="triton")


def test_triton_for_tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cache = TurboQuantCache(small_config(), backend="triton")
    x = torch.randn(1, 2, 20, 32)
    with pytest.raises(ValueError, match=r"unavailable for tensors on cpu; use backend=\"auto\""):
        cache.update(x, x, 0)
    assert cache.get_seq_length() == 0
