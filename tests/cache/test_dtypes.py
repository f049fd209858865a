"""Models in 16 bits, autocast in all orders, and one config object in several threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import feed as feed_steps
from support.cache_name import with_cache
from support.kernels.device import INTERPRETED
from support.models.small_model import METHODS, VOCAB, method_config, mixed_config, small_model
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention, load_config

SIZES = [60, 1, 2, 20, 1, 16]
"""Sizes of a prompt, steps, speculative blocks and a chunk; the first and the later ones pack tokens."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
LOST = {"commvq": 0.16}
"""Relative error of logits if rounding changes codes of keys: more than .03 with few, random codebooks."""


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, sum(SIZES)), generator=torch.Generator().manual_seed(0))


Context = Callable[[], AbstractContextManager[Any]]
bf16: Context = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def feed(model: LlamaForCausalLM, cache: Cache, ids: torch.Tensor, contexts: list[Context] | None = None) -> Any:
    """Float32 logits of `ids`, fed in steps of `SIZES`, each step in its own context."""
    logits = []
    for part, context in zip(ids.split(SIZES, 1), contexts or [nullcontext] * len(SIZES), strict=True):
        with torch.no_grad(), context():
            logits.append(model(part, **with_cache(cache)).logits.float())
    return torch.cat(logits, 1)


def rms_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def both_ways(model: LlamaForCausalLM, name: str, ids: torch.Tensor, contexts: Any = None) -> tuple[Any, list[Any]]:
    """Logits not fused and fused, and the caches."""
    logits, caches = [], []
    for fused in (False, True):
        (enable_fused_attention if fused else disable_fused_attention)(model)
        caches.append(CompressedCache(model.config, method_config(name)))
        logits.append(feed(model, caches[-1], ids, contexts))
        assert caches[-1].packed_tokens >= 64
    disable_fused_attention(model)
    return logits, caches


@pytest.mark.parametrize("dtype", ROUNDING, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", METHODS)
def test_16_bit_models(name: str, dtype: torch.dtype, ids: torch.Tensor, tmp_path: Path) -> None:
    """Fused and not fused agree to the dtype's rounding, through two layers; saved caches go on; `generate` runs."""
    model = small_model().to(dtype)
    (plain, fused), caches = both_ways(model, name, ids)
    assert {layer.keys.dtype for cache in caches for layer in cache.layers} == {dtype}
    assert rms_error(fused, plain) < SEARCHED.get(name, 2 * ROUNDING[dtype])
    caches[1].save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model.config)
    assert {layer.keys.dtype for layer in loaded.layers} == {dtype}
    with torch.no_grad():
        assert torch.equal(*(feed_steps(model, one, ids[:, :42], [1, 1, 40]) for one in (loaded, caches[1])))
    exact = small_model()
    lost = rms_error(feed(exact, CompressedCache(exact.config, method_config(name)), ids), plain)
    assert lost < LOST.get(name, 0.03)
    with compress(model, method_config(name)) as handle:
        output = model.generate(ids[:, :60], max_new_tokens=12, do_sample=False)
    assert output.shape == (2, 72)
    assert handle.last_cache.packed_tokens >= 32


SEARCHED = {"commvq": 0.03, "spectral": 0.01}
"""Methods that search for codes: another rounding of a layer's input may find others that are as good."""
ORDERS = {
    "always": [bf16] * 6,
    "at-first": [bf16] * 3 + [nullcontext] * 3,
    "later": [nullcontext] * 3 + [bf16] * 3,
    "in-turn": [bf16, nullcontext] * 3,
}


@pytest.mark.parametrize(
    ("name", "order"),
    [("kivi", "always"), ("kivi", "at-first"), ("turboquant", "later"), ("commvq", "in-turn"), ("spectral", "in-turn")],
)
def test_autocast(name: str, order: str, ids: torch.Tensor) -> None:
    """Logits under autocast, where keys and values have different and changing dtypes, are as good as without."""
    model = small_model()
    exact = feed(model, CompressedCache(model.config, method_config(name)), ids)
    logits, caches = both_ways(model, name, ids, ORDERS[order])
    assert max(rms_error(one, exact) for one in logits) < LOST.get(name, 0.03)
    for cache in caches:
        assert cache.layers[0].keys.dtype == torch.float32
        assert cache.layers[0].values.dtype == (torch.bfloat16 if order == "always" else torch.float32)
        assert torch.isfinite(cache.layers[1].values).all()


def test_autocast_leaves_the_codes_alone(ids: torch.Tensor) -> None:
    cache, same = (CompressedCache(small_model().config, method_config("turboquant")) for _ in range(2))
    states = torch.randn(2, 2, 60, 32, generator=torch.Generator().manual_seed(0))
    cache.update(states, states, 0)
    with bf16():
        same.update(states, states, 0)
        assert torch.equal(same.layers[0].keys, cache.layers[0].keys)
    assert cache.packed_tokens == same.packed_tokens == 32


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's kernels on tensors of the CPU")
@pytest.mark.parametrize("estimator", ["mse", "prod"])
def test_autocast_leaves_the_codes_of_static_steps_alone(estimator: str) -> None:
    """Sides with a kernel encoder and those that PyTorch encodes."""
    side = {"method": "turboquant", "bits": 3, "codebook": "lloyd_max", "estimator": estimator}
    config = {"keys": side, "values": side, "sink_tokens": 4, "recent_tokens": 8, "max_cache_len": 120}
    cache, same = (CompressedCache(small_model().config, {**config, "backend": "triton"}) for _ in range(2))
    states = torch.randn(2, 2, 90, 32, generator=torch.Generator().manual_seed(0))
    for start, stop in ((0, 60), *((at, at + 1) for at in range(60, 90))):
        step = states[:, :, start:stop]
        cache.update(step, step, 0)
        with bf16():
            same.update(step, step, 0)
    (keys, _), (others, _) = (one.layers[0].views() for one in (same, cache))
    count = cache.packed_tokens
    assert count == same.packed_tokens == 64
    for ours, theirs in zip(keys.store.read(0, count), others.store.read(0, count), strict=True):
        assert torch.equal(ours, theirs)


def test_one_config_for_models_in_threads(ids: torch.Tensor) -> None:
    config = load_config(mixed_config())
    models = [small_model(seed=seed) for seed in (0, 1)]

    def generate(model: LlamaForCausalLM) -> tuple[torch.Tensor, int]:
        with compress(model, config) as handle:
            output = model.generate(ids[:, :60], max_new_tokens=30, do_sample=False)
        return output, handle.last_cache.packed_tokens

    alone = [generate(model) for model in models]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(generate, models))
    assert not torch.equal(alone[0][0], alone[1][0])
    for (output, packed), (expected, _) in zip(together, alone, strict=True):
        assert torch.equal(output, expected)
        assert packed == 64
