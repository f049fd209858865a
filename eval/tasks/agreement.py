"""How long a compressed cache writes what the full one writes, and how likely the full one finds the rest.

Both generate greedily after the same prompt. The full cache then reads what the compressed one wrote: the first token
that it would not have written itself is where the two part, and its probabilities of all tokens tell whether what
follows is another good text or a bad one.

    kvcache-compress eval agreement --cache best-3bit --cache turboquant-4bit --output agreement.jsonl
"""

import statistics
from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun

from .benchmark import Record, Sample
from .perplexity import Perplexity


class Agreement(Perplexity):
    """Greedy tokens before the first that differs from the full cache's, after windows of texts.

    Scores are `same`, the median of these numbers of tokens over windows, its quartiles `same_25` and `same_75`, `all`,
    the share of windows without a difference, and `logprob`, the mean log-probability that the full cache gives to a
    token that was written, in nats. Texts are cut as by `Perplexity`.
    """

    kind: ClassVar[str] = "agreement"
    main_score: ClassVar[str] = "same"
    higher_is_better = True

    prefix: int = Field(default=900, ge=1, description="Tokens to prefill.")
    scored: int = Field(default=64, ge=1, description="Tokens to generate.")
    step: int = Field(default=1, ge=1, description="Tokens per pass of the full cache that reads them.")
    windows: int = Field(default=4, ge=1, description="Prompts per text.")

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        written = run.generate(self.scored)
        log_p = run.prefill.full_logits(written, self.step)[:-1].log_softmax(-1).cpu()
        same = int((log_p.argmax(-1) == written).cumprod(0).sum())
        logprob = log_p.gather(-1, written[:, None]).mean().item()
        return {"domain": sample.data["domain"], "same": same, "logprob": logprob}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        same = torch.tensor([record["same"] for record in records], dtype=torch.float64)
        low, median, high = same.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        logprob = statistics.fmean(record["logprob"] for record in records)
        everywhere = statistics.fmean(record["same"] == self.scored for record in records)
        return {"same": median, "same_25": low, "same_75": high, "all": everywhere, "logprob": logprob}
