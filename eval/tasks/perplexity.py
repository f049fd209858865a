"""KL divergence, perplexity and top-1 agreement of a compressed cache with the full one, and what both write.

A text is cut into windows of a prefix and a continuation. The prefix is prefilled. The continuation is then fed in
forward passes of `step` tokens, so that each of its tokens attends to the prefix as the cache stores it. (Scoring a
whole text in one pass would use no cache at all.) The reference is the same with an uncompressed cache.

Tokens of one pass see each other uncompressed, which they do not in generation. With short passes a cache without a
recent window shows about twice the KL of a single pass, so compare only figures of the same `step`. The default of 16
gives the KL of token-by-token decoding in a fifth of its time.

    kvcache-compress eval perplexity --cache turboquant-4bit --cache hqq-4 --output results

`Agreement` lets both generate greedily after the same prompt. The full cache then reads what the compressed one wrote:
the two part at the first token that it would not have written itself, and its probabilities of all tokens tell whether
what follows is as good.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import STEP_TOKENS, CacheRun
from kvcache_compress.validation import AnyPath, AnyTuple

from .benchmark import Record, Sample
from .scoring import ForcedBenchmark, compare_tokens, cut_windows, kl_scores, read_texts, scores_by, text_name

PART, LARGEST = 250, 32
"""A record keeps the mean KL of each 250 tokens of a window, and the 32 largest KLs."""
DEFAULT_TEXT = Path(__file__).with_name("data") / "default_text.txt"


class Perplexity(ForcedBenchmark):
    """KL divergence, perplexity and top-1 agreement with the full cache, on windows of texts.

    Perplexity scores all S tokens of the continuation, the first by the prefill's last logits. KL and top-1 are over
    the logits after each of the S tokens, all of which went through the cache. The prefill's logits are left out:
    most caches give them exactly, so they would only dilute the figures.

    Each of `texts` is a domain, named by the last two parts of its path. A short text gives fewer windows, with a
    warning (see `cut_windows`). `limit` counts windows of each domain.

    Scores are `kl` in nats, `kl_stderr` (its standard error over windows), `kl_999` (the KL that one token in a
    thousand exceeds), `perplexity` and `top1`; with several domains also `kl.DOMAIN` and so on. Records hold the KL of
    each `PART` tokens and the `LARGEST` single ones.
    """

    kind: ClassVar[str] = "perplexity"
    limit: int | None = Field(default=None, ge=1, description="Most windows of each text to take; all by default.")
    texts: AnyTuple[AnyPath] = Field(
        default=(DEFAULT_TEXT,), min_length=1, description="Text file, or folder of .txt files; each is a domain."
    )
    prefix: int = Field(default=1024, ge=1, description="Tokens to prefill.")
    scored: int = Field(default=256, ge=1, description="Tokens to score after them.")
    windows: int = Field(default=6, ge=1, description="Windows of prefix + scored tokens, per text.")

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return [sample for text in self.texts for sample in self._windows(text, tokenizer)]

    def _windows(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        token_ids = tokenizer(read_texts(path), add_special_tokens=False, verbose=False)["input_ids"]
        bos = tokenizer("")["input_ids"]
        cut = cut_windows(token_ids, prefix=self.prefix, scored=self.scored, windows=self.windows, bos=bos)
        domain = text_name(path)
        return [
            Sample(
                id=f"{domain}:{number}",
                prompt=window[:, : -self.scored],
                data={"domain": domain, "continuation": window[0, -self.scored :].tolist()},
            )
            for number, window in enumerate(cut[: self.limit])
        ]

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        continuation = torch.tensor(sample.data["continuation"])
        return {"domain": sample.data["domain"], **score_window(run, continuation, self.step)}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        return scores_by("domain", records, window_scores)


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


def score_window(run: CacheRun, continuation: torch.Tensor, step: int = STEP_TOKENS) -> Record:
    """Force a continuation `[S]` through the cache, and compare its logits with the full cache's."""
    reference = run.prefill.full_logits(continuation, step)
    nll, kl, same = compare_tokens(reference, run.forced(continuation, step), continuation)
    means = {"nll": nll.mean().item(), "kl": kl.mean().item(), "top1": same.double().mean().item()}
    parts = [float(f"{part.mean().item():.4g}") for part in kl.split(PART)]
    largest = [float(f"{each:.4g}") for each in kl.topk(min(LARGEST, len(kl))).values.tolist()]
    return {**means, "scored": len(kl), "kl_parts": parts, "kl_largest": largest}


def window_scores(records: Sequence[Record]) -> dict[str, float]:
    """The scores of `Perplexity` from the records of some windows."""
    mean = {name: statistics.fmean(record[name] for record in records) for name in ("nll", "kl", "top1")}
    # Tokens that are not kept count as 0: they are far below the quantile, unless most of it lies in one window.
    tokens = torch.zeros(sum(record["scored"] for record in records), dtype=torch.float64)
    largest = torch.tensor([kl for record in records for kl in record["kl_largest"]], dtype=torch.float64)
    tokens[: len(largest)] = largest
    scores = {"kl": mean["kl"], "perplexity": math.exp(mean["nll"]), "top1": mean["top1"]}
    scores["kl_999"] = torch.quantile(tokens, 0.999).item()
    return scores | kl_scores(records)
