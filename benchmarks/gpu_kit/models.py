"""Time decoding and memory of models with random weights, with compressed caches and with the full one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention
from kvcache_compress.bench.compare import compare_view
from kvcache_compress.bench.layers import Shape, named_config
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.cache.layer import CompressedLayer

STEPS = 32
"""Timed steps: one flush interval of the presets, so that the encoding counts with its share."""
FILL_TOKENS = 32_768
"""Tokens per update when a cache is filled: with fewer, Python's calls would dominate the time."""


@dataclass(frozen=True)
class ModelTime:
    """Time and memory of one cache in one model.

    Attributes:
        cache: preset, or `full`.
        tokens: tokens in the cache when decoding began.
        tokens_per_second: decoded tokens of the batch per second.
        fill_seconds: time to fill the cache with keys and values of `tokens` tokens, without the model.
        cache_gib: memory of the filled cache.
        peak_gib: peak memory of the device during decoding, weights included; None if the device does not report it.
        attention_error: relative error of one layer's attention, compared before the timing; None for `full`.
        error: why there are no figures.
    """

    cache: str
    batch: int
    tokens: int
    tokens_per_second: float | None = None
    fill_seconds: float | None = None
    cache_gib: float | None = None
    peak_gib: float | None = None
    attention_error: float | None = None
    error: str | None = None


def random_llama(shape: Shape, layers: int, hidden: int, intermediate: int, device: torch.device) -> LlamaForCausalLM:
    """Bfloat16 Llama of these sizes with random weights, which take the same time as trained ones."""
    config = LlamaConfig(
        vocab_size=128_256 if hidden > 1024 else 1024, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=shape.query_heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=1 << 20, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02)
    return model.eval()


def model_time(model: PreTrainedModel, name: str, batch: int, tokens: int) -> ModelTime:
    """Time decoding with a cache, `full` or a preset's, that holds `tokens` tokens.

    Raises:
        ValueError: attention is wrong.
    """
    with on_model(model, name):
        return _measure(model, name, cache_maker(model, name), batch, tokens)


def cache_maker(model: PreTrainedModel, name: str) -> Callable[[], Cache]:
    """Factory of empty caches: Transformers' own for `full`, else a preset's."""
    if name == "full":
        return partial(DynamicCache, config=model.config)
    return partial(CompressedCache, model.config, named_config(name))


@contextmanager
def on_model(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context with the model's GPU as the current one, and fused attention unless `full`; frees memory at its end."""
    fused, on_gpu = name != "full", model.device.type == "cuda"
    if fused:
        enable_fused_attention(model)
    try:
        with torch.cuda.device(model.device if on_gpu else -1), torch.inference_mode():
            yield
    finally:
        if fused:
            disable_fused_attention(model)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def synchronize(model: PreTrainedModel) -> None:
    """Wait for the model's GPU, if any."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def peak_gib(model: PreTrainedModel) -> float | None:
    """Peak memory of the model's GPU since `torch.cuda.reset_peak_memory_stats`; None without a GPU."""
    return torch.cuda.max_memory_allocated(model.device) / 2**30 if model.device.type == "cuda" else None


def _measure(model: PreTrainedModel, name: str, make: Callable[[], Cache], batch: int, tokens: int) -> ModelTime:
    on_gpu = model.device.type == "cuda"
    fill(model, make(), batch, min(tokens, 8192))  # compiles the encoders
    gc.collect()
    cache = make()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    fill_seconds = fill(model, cache, batch, tokens)
    used = torch.cuda.memory_allocated() - before if on_gpu else cache_bytes(cache)
    ids = torch.randint(1000, (batch, 1), device=model.device)
    for _ in range(3):
        model(input_ids=ids, past_key_values=cache)
    error = _attention_error(model, cache)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize(model)
    begun = time.perf_counter()
    for _ in range(STEPS):
        ids = model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    synchronize(model)
    seconds = time.perf_counter() - begun
    speed = STEPS * batch / seconds
    return ModelTime(name, batch, tokens, speed, fill_seconds, used / 2**30, peak_gib(model), error)


def _attention_error(model: PreTrainedModel, cache: Cache) -> float | None:
    """Relative error of attention over a layer in the middle; None if the cache is not compressed.

    Raises:
        ValueError: the error is larger than allowed.
    """
    layer = cache.layers[len(cache.layers) // 2]
    if not isinstance(layer, CompressedLayer):
        return None
    config, view = model.config, layer.step()
    size = (layer.batch_size, config.num_attention_heads, 1, config.head_dim)
    query = torch.randn(size, device=model.device, dtype=model.dtype)
    return compare_view(view, query, config.head_dim**-0.5)


def fill(model: PreTrainedModel, cache: Cache, batch: int, tokens: int) -> float:
    """Fill every layer with random keys and values, a piece at a time; returns the seconds spent in `update`."""
    config, seconds = model.config, 0.0
    for layer in range(config.num_hidden_layers):
        for start in range(0, tokens, FILL_TOKENS):
            size = (batch, config.num_key_value_heads, min(FILL_TOKENS, tokens - start), config.head_dim)
            keys, values = (torch.randn(size, device=model.device, dtype=model.dtype) for _ in range(2))
            synchronize(model)
            begun = time.perf_counter()
            cache.update(keys, values, layer)
            synchronize(model)
            seconds += time.perf_counter() - begun
    return seconds


def cache_bytes(cache: Cache) -> int:
    if isinstance(cache, CompressedCache):
        return cache.memory_report().total_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
