"""Time decode steps of a real model with several caches, interleaved, so that machine noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel

from kvcache_compress.attention.interface import disable_fused_attention, enable_fused_attention
from kvcache_compress.eval.caches.caches import CacheSpec
from kvcache_compress.eval.provenance.results import error_message
from kvcache_compress.modeling.decoder import cache_argument

WARM_UP_TOKENS = 256


@dataclass(frozen=True)
class StepTime:
    """Times of one cache at one length.

    Attributes:
        cache: name of the cache.
        tokens: tokens of the prompt.
        step_ms: median time of a decode step.
        ratio: time of a step relative to the first cache's in the same round, median over the rounds.
        decode_seconds: time of all steps together, the slow ones among them in which tokens are packed.
        prefill_seconds: time of the prompt in one piece.
        prefill_ratio: that time relative to the first cache's.
        error: why there are no figures.
    """

    cache: str
    tokens: int
    step_ms: float | None = None
    ratio: float | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    prefill_ratio: float | None = None
    error: str | None = None


@torch.inference_mode()
def measure_steps(
    model: PreTrainedModel, specs: Sequence[CacheSpec], ids: torch.Tensor, steps: int = 32, prefills: int = 1
) -> list[StepTime]:
    """Fill a cache of each kind with the prompt `ids` `[B, T]`, then decode `steps` tokens with each, interleaved.

    Compressed caches use fused attention. The prompt runs `prefills` times per cache, also interleaved, and the fastest
    counts. The others are compared with the first cache, which must not fail.
    """
    caches: dict[str, Cache] = {}
    prompts: dict[str, list[float]] = {spec.name: [] for spec in specs}
    times: dict[str, list[float]] = {spec.name: [] for spec in specs}
    errors: dict[str, str] = {}

    def forward(name: str, tokens: torch.Tensor, into: dict[str, list[float]]) -> None:
        begun = time.perf_counter()
        try:
            model(tokens, **{cache_argument(): caches[name]}, logits_to_keep=1)
        except Exception as error:
            errors[name] = error_message(error)
        into[name].append(time.perf_counter() - begun)

    enable_fused_attention(model)
    try:
        for spec in specs:  # Warm-up: compilation at first use is not timed.
            caches[spec.name] = spec.make(model)
            forward(spec.name, ids[:, :WARM_UP_TOKENS], {spec.name: []})
        for _ in range(prefills):
            for spec in specs:
                caches[spec.name] = spec.make(model)
                forward(spec.name, ids, prompts)
        for _ in range(steps):
            for name in prompts:
                forward(name, ids[:, -1:], times)
    finally:
        disable_fused_attention(model)
    first = specs[0].name
    return [
        StepTime(name, ids.shape[1], error=errors[name])
        if name in errors
        else StepTime(
            name,
            ids.shape[1],
            1e3 * statistics.median(times[name]),
            statistics.median(x / y for x, y in zip(times[name], times[first], strict=True)),
            sum(times[name]),
            min(prompts[name]),
            min(prompts[name]) / min(prompts[first]),
        )
        for name in prompts
    ]
