"""Time a prompt in models with random weights, in one piece and in chunks, and find the longest context that fits.

Meant for a GPU; on a CPU the same code runs for tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import Cache, PreTrainedModel

from kvcache_compress.eval.provenance.results import error_message

from .jobs import NOT_MEASURED
from .models import cache_bytes, cache_maker, fill, on_model, peak_gib, synchronize


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
        model(input_ids=part, past_key_values=cache, logits_to_keep=1)
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
                model(input_ids=ids, past_key_values=cache)
                result = replace(result, tokens=cache.get_seq_length(), cache_gib=cache_bytes(cache) / 2**30)
        except Exception as error:
            end = error_message(error)
            if "out of memory" not in end or not result.tokens:
                raise
            result = replace(result, end=end)
    return result
