"""The loss of a compressed cache against the full cache, over windows of a text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvcache_compress.config import CompressionConfig
from kvcache_compress.eval.caches.caches import Measured, full_cache, preset_cache
from kvcache_compress.eval.caches.prefill import STEP_TOKENS, prefill
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.scoring import compare_tokens


class Scores(NamedTuple):
    """Scores of each token of a window, as from `compare_tokens`, and the cache's size."""

    nll: torch.Tensor
    kl: torch.Tensor
    same: torch.Tensor
    measured: Measured


class Window:
    """A prefix, prefilled once for all caches, and its continuation."""

    def __init__(self, model: PreTrainedModel, sample: Sample, step: int = STEP_TOKENS) -> None:
        self.prefill = prefill(model, sample.prompt)
        self.tokens, self.step = torch.tensor(sample.data["continuation"]), step
        self.reference = self.prefill.run(full_cache()).forced(self.tokens, step)

    def score(self, config: CompressionConfig) -> Scores:
        """Score the continuation through a cache of this config.

        Raises:
            ValueError: The config does not fit the model, or packs nothing of the prefix.
        """
        run = self.prefill.run(preset_cache(config, name="scored"))
        if not run.measured.packed_tokens:
            raise ValueError(
                f"prefix: nothing is packed after {self.prefill.ids.shape[1]} tokens, so there is no loss to measure; "
                "use a longer prefix, or fewer sinks and recent tokens"
            )
        logits = run.forced(self.tokens, self.step)
        nll, kl, same = compare_tokens(self.reference, logits, self.tokens)
        return Scores(nll, kl, same, run.measured)


@dataclass(frozen=True)
class Loss:
    """Loss of a cache against the full cache, averaged over windows.

    Attributes:
        kl: KL(full || this) in nats per token.
        kl_stderr: standard error of `kl` over windows; None for one window.
        kl_999: the KL that one token in a thousand exceeds.
        top1: share of tokens after which the most likely token is the full cache's.
        perplexity: of the text.
        packed_bits: bits per packed number.
        all_bits: bits per number of the whole cache, dense tokens included.
        packed_tokens: packed tokens per sequence after the prefix.
    """

    kl: float
    kl_stderr: float | None
    kl_999: float
    top1: float
    perplexity: float
    packed_bits: float
    all_bits: float
    packed_tokens: float

    @classmethod
    def of(cls, windows: Sequence[Scores]) -> Loss:
        """Average over the windows of one cache."""
        means = [scores.kl.mean().item() for scores in windows]
        sizes = [scores.measured for scores in windows]
        kl = torch.cat([scores.kl for scores in windows])
        return cls(
            kl=kl.mean().item(),
            kl_stderr=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
            kl_999=torch.quantile(kl, 0.999).item(),
            top1=torch.cat([scores.same for scores in windows]).double().mean().item(),
            perplexity=torch.cat([scores.nll for scores in windows]).mean().exp().item(),
            packed_bits=statistics.fmean(size.packed_bits for size in sizes),
            all_bits=statistics.fmean(size.all_bits for size in sizes),
            packed_tokens=statistics.fmean(size.packed_tokens for size in sizes),
        )
