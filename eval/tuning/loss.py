"""The loss of a compressed cache against the full cache, over windows of a text."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch
from transformers import PreTrainedModel

from kvcache_compress.config import CompressionConfig
from kvcache_compress.eval.caches.caches import preset_cache
from kvcache_compress.eval.caches.prefill import Prefill, prefill
from kvcache_compress.eval.runner.progress import Progress
from kvcache_compress.eval.tasks.benchmark import Record, Sample
from kvcache_compress.eval.tasks.perplexity import score_window, window_scores


def score(shared: Prefill, sample: Sample, config: CompressionConfig) -> Record:
    """Score a window's continuation through a cache of this config, with the cache's size.

    Raises:
        ValueError: The config does not fit the model, or packs nothing of the prefix.
    """
    run = shared.run(preset_cache(config, name="scored"))
    if not run.measured.packed_tokens:
        raise ValueError(
            f"prefix: nothing is packed after {shared.ids.shape[1]} tokens, so there is no loss to measure; "
            "use a longer prefix, or fewer sinks and recent tokens"
        )
    return score_window(run, torch.tensor(sample.data["continuation"])) | asdict(run.measured)


def measure_losses(
    model: PreTrainedModel, samples: Sequence[Sample], configs: Sequence[CompressionConfig], on_progress: Progress
) -> list[dict[str, float]]:
    """Measure caches of some configs on the same windows: the scores of `Perplexity`, and `packed_bits`.

    Raises:
        ValueError: A config does not fit the model, or packs nothing.
    """
    found: list[list[Record]] = [[] for _ in configs]
    for done, sample in enumerate(samples):
        on_progress(done, len(samples), "windows")
        shared = prefill(model, sample.prompt)
        for records, config in zip(found, configs, strict=True):
            records.append(score(shared, sample, config))
    on_progress(len(samples), len(samples), "windows")
    return [
        window_scores(records) | {"packed_bits": statistics.fmean(record["packed_bits"] for record in records)}
        for records in found
    ]
