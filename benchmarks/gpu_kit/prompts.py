"""What a prompt costs: whole models with random weights take one, in one piece and in chunks, and the longest context.

On a GPU; on a CPU the same code runs, for tests.
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
    """One cache, one prompt of random tokens.

    Attributes:
        cache: preset, or `full`.
        tokens: of the prompt.
        chunk: tokens of the prompt per forward pass.
        seconds: of the whole prompt.
        ratio: of that to the full cache's in chunks of the same size, where both were measured.
        peak_gib: the device's most meanwhile, weights included; None where it does not count.
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
    """The most tokens from which a step could be decoded, tried in whole pieces.

    Attributes:
        cache: preset, or `full`.
        tokens: in the cache.
        cache_gib: what it held.
        end: why no more were tried.
        error: why the figures are not final.
    """

    cache: str
    tokens: int
    cache_gib: float
    end: str
    error: str | None = None


def prefill_time(model: PreTrainedModel, name: str, tokens: int, chunk: int) -> PrefillTime:
    """A prompt of `tokens` for the full cache or a preset's, `chunk` tokens at a time."""
    ids = torch.randint(1000, (1, tokens), device=model.device)
    make = cache_maker(model, name)
    with on_model(model, name):
        _prefill(model, make(), ids[:, : min(tokens, 2 * chunk)], chunk)  # compiles what must be
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
    """Fills the full cache or a preset's with pieces of random tokens, and decodes a step after each.

    Until memory is out, `most` tokens were filled in, or it is `late`; then a later run measures it.

    Raises:
        Exception: what fails for another reason than memory, or with no tokens at all.
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    found = LongestContext(name, 0, 0.0, f"no more than {most} were tried")
    with on_model(model, name):
        try:
            cache = cache_maker(model, name)()
            for _ in range(most // piece):
                if late():
                    return replace(found, end="time", error=f"{NOT_MEASURED} time, {found.tokens} tokens fit")
                fill(model, cache, 1, piece)
                model(input_ids=ids, past_key_values=cache)
                found = replace(found, tokens=cache.get_seq_length(), cache_gib=cache_bytes(cache) / 2**30)
        except Exception as error:
            end = error_message(error)
            if "out of memory" not in end or not found.tokens:
                raise
            found = replace(found, end=end)
    return found
