"""Time models with random weights, with compressed caches and the full one: decoding, prompts, and what fits.

Meant for a GPU; on a CPU the same code runs for tests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention
from kvcache_compress.bench.compare import Comparison, compare_views
from kvcache_compress.bench.layers import Shape, named_config
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.cache.layer import CompressedLayer
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.eval.provenance.results import error_message
from kvcache_compress.modeling.decoder import cache_argument

from .check_static import WARM_UP_STEPS, record
from .jobs import NOT_MEASURED

STEPS, FEW_STEPS = 32, 4
"""Timed steps: one flush interval of the presets, so that the encoding counts with its share; without a GPU, fewer."""
MORE_TOKENS = 64
"""Capacity of a static cache beyond the tokens that it is filled with."""
FILL_TOKENS = 32_768
"""Tokens per update when a cache is filled: with fewer, Python's calls would dominate the time."""


@dataclass(frozen=True)
class ModelTime:
    """Time and memory of one cache in one model.

    Attributes:
        cache: preset, or `full`.
        tokens: tokens in the cache when decoding began.
        loop: `eager`, with a growing cache, Transformers' `DynamicCache` for `full`; or `graph`, with a static one
            (`StaticCache`) and each step replayed from a CUDA graph.
        tokens_per_second: decoded tokens of the batch per second.
        fill_seconds: time to fill the cache with keys and values of `tokens` tokens, without the model.
        cache_gib: memory of the filled cache.
        peak_gib: peak memory of the device during decoding, weights included; None if the device does not report it.
        attention_error: relative error of one layer's attention, compared before the timing; None for `full`.
        invalid: why the figures do not count.
        error: why there are no figures.
    """

    cache: str
    batch: int
    tokens: int
    loop: str
    tokens_per_second: float | None = None
    fill_seconds: float | None = None
    cache_gib: float | None = None
    peak_gib: float | None = None
    attention_error: float | None = None
    invalid: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class PrefillTime:
    """Time of a prompt of random tokens with one cache.

    Attributes:
        cache: preset, or `full`.
        tokens: tokens of the prompt.
        chunk: tokens of the prompt per forward pass.
        seconds: time of the complete prompt.
        ratio: that time relative to the full cache's in chunks of the same size, if both were measured.
        peak_gib: peak memory of the device, weights included; None if the device does not report it.
        error: why there are no figures.
    """

    cache: str
    tokens: int
    chunk: int
    seconds: float | None = None
    ratio: float | None = None
    peak_gib: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class LongestContext:
    """Longest context from which a step could be decoded, found by adding pieces of tokens.

    Attributes:
        cache: preset, or `full`.
        tokens: tokens in the cache.
        cache_gib: memory of the cache.
        end: why no more tokens were tried.
        error: why the figures are not final.
    """

    cache: str
    tokens: int
    cache_gib: float
    end: str
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


def model_time(model: PreTrainedModel, name: str, batch: int, tokens: int, loop: str) -> ModelTime:
    """Time decoding with a cache, `full` or a preset's, that holds `tokens` tokens; `loop` is `eager` or `graph`.

    Without a GPU, the steps that would be replayed from a graph are plain calls.
    """
    capacity = tokens + MORE_TOKENS if loop == "graph" else None
    with on_model(model, name):
        return _measure(model, name, cache_maker(model, name, capacity), batch, tokens, loop)


def cache_maker(model: PreTrainedModel, name: str, capacity: int | None = None) -> Callable[[], Cache]:
    """Factory of empty caches: Transformers' own for `full`, else a preset's; static if there is a `capacity`."""
    if name != "full":
        config = named_config(name)
        config = config if capacity is None else config.changed(max_cache_len=capacity)
        return partial(CompressedCache, model.config, config)
    if capacity is not None:
        return partial(StaticCache, config=model.config, max_cache_len=capacity)
    return partial(DynamicCache, config=model.config)


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


def _measure(
    model: PreTrainedModel, name: str, make: Callable[[], Cache], batch: int, tokens: int, loop: str
) -> ModelTime:
    on_gpu = model.device.type == "cuda"
    fill(model, make(), batch, min(tokens, 8192))  # compiles the encoders
    gc.collect()
    cache = make()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    fill_seconds = fill(model, cache, batch, tokens)
    used = torch.cuda.memory_allocated() - before if on_gpu else cache_bytes(cache)
    ids = torch.randint(1000, (batch, 1), device=model.device)
    positions = torch.full((1, 1), tokens, device=model.device)
    step = decode_step(model, cache, ids, positions)
    for _ in range(WARM_UP_STEPS):
        step()
    error, problem = _compared(model, cache)
    run = record(step) if loop == "graph" and on_gpu and not interpreting() else step
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    synchronize(model)
    begun = time.perf_counter()
    steps = STEPS if on_gpu else FEW_STEPS
    for _ in range(steps):
        run()
    synchronize(model)
    speed = steps * batch / (time.perf_counter() - begun)
    return ModelTime(
        name, batch, tokens, loop, speed, fill_seconds, used / 2**30, peak_gib(model), error, problem
    )  # fmt: skip


def decode_step(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, positions: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Step that a CUDA graph can record: it replaces tokens `[B, 1]` by the next ones, and advances positions."""

    def step() -> torch.Tensor:
        logits = model(input_ids=ids, **{cache_argument(): cache}, position_ids=positions).logits
        positions.add_(1)
        return ids.copy_(logits[:, -1:].argmax(-1))

    return step


def _compared(model: PreTrainedModel, cache: Cache) -> Comparison:
    """Compare attention over a layer in the middle; nothing if the cache is not compressed."""
    layer = cache.layers[len(cache.layers) // 2]
    if not isinstance(layer, CompressedLayer):
        return Comparison(None, None)
    config = model.config
    size = (layer.batch_size, config.num_attention_heads, 1, config.head_dim)
    query = torch.randn(size, device=model.device, dtype=model.dtype)
    return compare_views(*layer.views(), query, config.head_dim**-0.5)


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


def prefill_time(model: PreTrainedModel, name: str, tokens: int, chunk: int) -> PrefillTime:
    """Time a prompt of `tokens` tokens with the full cache or a preset's, `chunk` tokens at a time."""
    ids = torch.randint(1000, (1, tokens), device=model.device)
    make = cache_maker(model, name)
    with on_model(model, name):
        _prefill(model, make(), ids[:, : min(tokens, 2 * chunk)], chunk)  # compiles the kernels
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _prefill(model, make(), ids, chunk)
        return PrefillTime(name, tokens, chunk, seconds, peak_gib=peak_gib(model))


def _prefill(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int) -> float:
    synchronize(model)
    begun = time.perf_counter()
    for part in ids.split(chunk, dim=1):
        model(input_ids=part, **{cache_argument(): cache}, logits_to_keep=1)
    synchronize(model)
    return time.perf_counter() - begun


def longest_context(
    model: PreTrainedModel, name: str, piece: int, most: int, late: Callable[[], bool] = lambda: False
) -> LongestContext:
    """Fill the full cache or a preset's with pieces of random tokens, decoding a step after each.

    It ends when memory runs out, at `most` tokens, or when it is `late`; in that case a later run measures it again.

    Raises:
        Exception: a failure for another reason than memory, or before the first piece.
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    result = LongestContext(name, 0, 0.0, f"no more than {most} were tried")
    with on_model(model, name):
        try:
            cache = cache_maker(model, name)()
            for _ in range(most // piece):
                if late():
                    return replace(result, end="time", error=f"{NOT_MEASURED} time, {result.tokens} tokens fit")
                fill(model, cache, 1, piece)
                model(input_ids=ids, **{cache_argument(): cache})
                result = replace(result, tokens=cache.get_seq_length(), cache_gib=cache_bytes(cache) / 2**30)
        except Exception as error:
            end = error_message(error)
            if "out of memory" not in end or not result.tokens:
                raise
            result = replace(result, end=end)
    return result
