"""KL divergence, perplexity and top-1 agreement of a compressed cache with the full one.

A text is cut into windows of a prefix and a continuation. The prefix is prefilled. The continuation is then fed in
forward passes of `step` tokens, so that each of its tokens attends to the prefix as the cache stores it. (Scoring a
whole text in one pass would use no cache at all.) The reference is the same with an uncompressed cache.

Tokens of one pass see each other uncompressed, which they do not in generation. With short passes a cache without a
recent window shows about twice the KL of a single pass, so compare only figures of the same `step`. The default of 16
gives the KL of token-by-token decoding in a fifth of its time.

    kvcache-compress eval perplexity --cache turboquant-4bit --cache hqq-4 --output results
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from os.path import isdir
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import STEP_TOKENS, CacheRun
from kvcache_compress.files.text import read_text
from kvcache_compress.validation import AnyPath, AnyTuple

from .benchmark import Benchmark, Record, Sample, register_benchmark
from .scoring import compare_tokens, cut_windows

DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")


@register_benchmark("perplexity")
class Perplexity(Benchmark):
    """KL divergence, perplexity and top-1 agreement with the full cache, on windows of texts.

    Perplexity scores all S tokens of the continuation, the first by the prefill's last logits. KL and top-1 are over
    the logits after each of the S tokens, all of which went through the cache. The prefill's logits are left out:
    most caches give them exactly, so they would only dilute the figures.

    Each of `texts` is a domain, named by the last two parts of its path. A short text gives fewer windows, with a
    warning (see `cut_windows`). `limit` counts windows of each domain.

    Scores are `kl` in nats, `kl_stderr` (its standard error over windows), `kl_999` (the KL that one token in a
    thousand exceeds), `perplexity` and `top1`; with several domains also `kl.DOMAIN` and so on. Records hold the KL of
    each token.
    """

    main_score: ClassVar[str] = "kl"
    higher_is_better = False
    limits_itself = True

    limit: int | None = Field(default=None, ge=1, description="Most windows of each text to take; all by default.")
    texts: AnyTuple[AnyPath] = Field(
        default=(DEFAULT_TEXT,), min_length=1, description="Text file, or folder of .txt files; each is a domain."
    )
    prefix: int = Field(default=1024, ge=1, description="Tokens to prefill.")
    scored: int = Field(default=256, ge=1, description="Tokens to score after them.")
    windows: int = Field(default=6, ge=1, description="Windows of prefix + scored tokens, per text.")
    step: int = Field(default=STEP_TOKENS, ge=1, description="Scored tokens per forward pass; 1 is as in generation.")

    @model_validator(mode="after")
    def _step_fits(self) -> Perplexity:
        if self.step > self.scored:
            raise ValueError(f"step={self.step}: must be at most scored={self.scored}")
        return self

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        return [sample for text in self.texts for sample in self._windows(text, tokenizer)]

    def _windows(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        token_ids = tokenizer(_read(path), add_special_tokens=False, verbose=False)["input_ids"]
        bos = tokenizer("")["input_ids"]
        cut = cut_windows(token_ids, prefix=self.prefix, scored=self.scored, windows=self.windows, bos=bos)
        domain = "/".join(path.resolve().parts[-2:])
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
        reference = run.prefill.full_logits(continuation, self.step)
        nll, kl, same = compare_tokens(reference, run.forced(continuation, self.step), continuation)
        means = {"nll": nll.mean().item(), "kl": kl.mean().item(), "top1": same.double().mean().item()}
        return {"domain": sample.data["domain"], **means, "kl_tokens": [float(f"{each:.4g}") for each in kl.tolist()]}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        scores = _scores(records)
        domains = list(dict.fromkeys(record["domain"] for record in records))
        for domain in domains if len(domains) > 1 else ():
            of_domain = [record for record in records if record["domain"] == domain]
            scores |= {f"{name}.{domain}": score for name, score in _scores(of_domain).items()}
        return scores


def _scores(records: Sequence[Record]) -> dict[str, float]:
    mean = {name: statistics.fmean(record[name] for record in records) for name in ("nll", "kl", "top1")}
    tokens = torch.tensor([kl for record in records for kl in record["kl_tokens"]], dtype=torch.float64)
    scores = {"kl": mean["kl"], "perplexity": math.exp(mean["nll"]), "top1": mean["top1"]}
    scores["kl_999"] = torch.quantile(tokens, 0.999).item()
    if len(records) > 1:
        scores["kl_stderr"] = statistics.stdev(record["kl"] for record in records) / math.sqrt(len(records))
    return scores


def _read(path: Path) -> str:
    files = sorted(path.glob("*.txt")) if isdir(path) else [path]
    if not files:
        raise ValueError(f"texts: no .txt file in the folder {path}")
    return "\n\n".join(read_text(file, f"texts={str(file)!r}") for file in files)
