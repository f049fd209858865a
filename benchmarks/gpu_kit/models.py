"""Whole models with random weights: decoding and memory with a compressed cache and with the full one."""

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
"""As many as pass between two packings of tokens in the presets, so that each is counted with its share."""
FILL_TOKENS = 32_768
"""Handed to a cache at a time: with few of them the time would be that of Python's calls."""


@dataclass(frozen=True)
class ModelTime:
    """One cache in one model.

    Attributes:
        cache: preset, or `full`.
        tokens: in the cache when decoding began.
        tokens_per_second: of decoding, over the batch.
        fill_seconds: handing keys and values of `tokens` tokens to the cache, without the model.
        cache_gib: what the filled cache holds.
        peak_gib: the device's most during decoding, weights included; None where it does not count.
        attention_error: of a layer beside plain attention, before decoding was timed; None for `full`.
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
    """A bfloat16 Llama of these sizes; its weights are noise, which costs what trained ones cost."""
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
    """Decoding from a cache that holds `tokens` tokens: `full`, or a preset's.

    Raises:
        ValueError: attention that is not right.
    """
    with on_model(model, name):
        return _measure(model, name, cache_maker(model, name), batch, tokens)


def cache_maker(model: PreTrainedModel, name: str) -> Callable[[], Cache]:
    """Makes empty caches: Transformers' own for `full`, else a preset's."""
    if name == "full":
        return partial(DynamicCache, config=model.config)
    return partial(CompressedCache, model.config, named_config(name))


@contextmanager
def on_model(model: PreTrainedModel, name: str) -> Iterator[None]:
    """With the model's GPU as the current one, and fused attention for all caches but `full`; frees memory after."""
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
    """Waits for the model's GPU, if it is on one."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def peak_gib(model: PreTrainedModel) -> float | None:
    """The most that its GPU held since `torch.cuda.reset_peak_memory_stats`; None where it is on none."""
    return torch.cuda.max_memory_allocated(model.device) / 2**30 if model.device.type == "cuda" else None


def _measure(model: PreTrainedModel, name: str, make: Callable[[], Cache], batch: int, tokens: int) -> ModelTime:
    on_gpu = model.device.type == "cuda"
    fill(model, make(), batch, min(tokens, 8192))  # compiles the encoders
    gc.collect()
    cache = make()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    fill_seconds = fill(model, cache, batch, tokens)
    held = torch.cuda.memory_allocated() - before if on_gpu else cache_bytes(cache)
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
    return ModelTime(name, batch, tokens, speed, fill_seconds, held / 2**30, peak_gib(model), error)


def _attention_error(model: PreTrainedModel, cache: Cache) -> float | None:
    """What attention over a layer in the middle differs by; None where the cache is not compressed.

    Raises:
        ValueError: more than is allowed.
    """
    layer = cache.layers[len(cache.layers) // 2]
    if not isinstance(layer, CompressedLayer):
        return None
    config, view = model.config, layer.step()
    size = (layer.batch_size, config.num_attention_heads, 1, config.head_dim)
    query = torch.randn(size, device=model.device, dtype=model.dtype)
    return compare_view(view, query, config.head_dim**-0.5)


def fill(model: PreTrainedModel, cache: Cache, batch: int, tokens: int) -> float:
    """Gives every layer random keys and values, a piece at a time: seconds of `update` alone."""
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
