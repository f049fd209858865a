"""KL divergence of caches that are filled in several turns: a system prompt and documents, a chat, a long answer.

A case says how long the parts of a history are. Each part goes through the model with the cache in one forward pass,
or a token at a time, as generation writes it. Then the text that follows the last part is scored as in
`perplexity.py`, against the full cache with the same history.

Caches that learn from their first prompt are tested hardest where that prompt is short or of another kind than what
follows. So consecutive parts come from different texts, or for comparison from one text.

    kvcache-compress eval turns --text news.txt --text code.txt --case 304+1744 --case "304+1744 like" --cache best-2bit
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import AfterValidator, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun, fused_attention
from kvcache_compress.validation import AnyPath, AnyTuple, quoted

from .benchmark import Record, Sample
from .samples import text_ids
from .scoring import ForcedBenchmark, compare_tokens, kl_scores, read_texts, scores_by, text_name

_LIKE = " like"
_CASE = re.compile(rf"[1-9]\d{{0,6}}s?(\+[1-9]\d{{0,6}}s?)*({_LIKE})?")


def _check_case(case: str) -> str:
    if not _CASE.fullmatch(case):
        raise ValueError(
            f"{quoted(case)} is no case; write tokens of parts as in 304+1744, in 128+1920s (the second part in single "
            f"steps) or in '304+1744{_LIKE}' (both from one text)"
        )
    return case


Case = Annotated[str, Field(strict=False, coerce_numbers_to_str=True), AfterValidator(_check_case)]


class Turns(ForcedBenchmark):
    """KL divergence from the full cache after a history of several parts.

    A case is written as the tokens of its parts: `2048`, `304+1744`. A part with an `s`, as in `128+1920s`, is forced
    one token at a time. Consecutive parts come from different texts; in a case that ends in ` like`, all come from one.

    Each window has the same last text and the same continuation in all cases, so cases are compared on the same
    tokens. The texts take turns as last and as earlier parts, each equally often if `windows` is a multiple of their
    number. Windows of one text overlap only if it is too short. `limit` counts windows of each case.

    All passes attend fused, as generation does. Scores are `kl` in nats, `kl_stderr` (its standard error over windows),
    and both for each case: `kl.CASE`. Sizes are those after the history.
    """

    kind: ClassVar[str] = "turns"
    limit: int | None = Field(default=None, ge=1, description="Most windows of each case to take; all by default.")
    texts: AnyTuple[AnyPath] = Field(min_length=2, description="Text file, or folder of .txt files; at least two.")
    cases: AnyTuple[Case] = Field(
        default=("2048", "1024+1024", "304+1744"),
        min_length=1,
        description="Tokens of each part: 304+1744, 128+1920s (single steps), '304+1744 like' (parts of one text).",
    )
    windows: int = Field(default=3, ge=1, description="Windows of each case.")

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        texts = [text_ids(tokenizer, read_texts(path), special=False) for path in self.texts]
        bos = tokenizer("")["input_ids"]
        plans = {(case, window): self._plan(case, window) for window in range(self.windows) for case in self.cases}
        longest: Counter[int] = Counter()  # tokens of each text, in the window that takes most
        for plan in plans.values():
            longest |= _tokens_by_text(plan)
        for text, tokens in longest.items():
            if tokens > (held := len(texts[text])):
                raise ValueError(
                    f"texts={str(self.texts[text])!r}: {held} tokens are too few for a window of {tokens}; give a "
                    "longer text, or shorter cases"
                )
        samples = []
        for (case, window), plan in plans.items():
            if self.limit is not None and window >= self.limit:
                continue
            next_token = {}
            for text, tokens in _tokens_by_text(plan).items():
                spare = len(texts[text]) - longest[text]
                next_token[text] = longest[text] - tokens + window * spare // max(self.windows - 1, 1)
            ids: list[int] = []
            for text, tokens in plan:
                ids += texts[text][next_token[text] : next_token[text] + tokens]
                next_token[text] += tokens
            ids[: len(bos)] = bos
            samples.append(self._sample(case, window, plan, ids))
        return samples

    def _plan(self, case: str, window: int) -> list[tuple[int, int]]:
        """Text and tokens of each part, and of the continuation."""
        count = len(self.texts)
        turn, last = divmod(window * max(1, count // self.windows), count)
        # In each turn through the texts, a part follows another text; the distance is never 0.
        apart = 0 if case.endswith(_LIKE) else 1 + turn % (count - 1)
        lengths = [sum(passes) for passes in _passes(case)]
        before = range(len(lengths) - 1, -1, -1)
        parts = [((last - apart * distance) % count, tokens) for distance, tokens in zip(before, lengths, strict=True)]
        return [*parts, (last, self.scored)]

    def _sample(self, case: str, window: int, plan: Sequence[tuple[int, int]], ids: Sequence[int]) -> Sample:
        first, *passes = [tokens for part in _passes(case) for tokens in part]
        history, continuation = torch.tensor([ids[: -self.scored]]), ids[-self.scored :]
        texts = [text_name(self.texts[text]) for text, _ in plan[:-1]]
        data = {"case": case, "texts": texts, "passes": passes, "continuation": continuation}
        return Sample(f"{case}:{window}", history[:, :first], data, history[:, first:])

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        continuation = torch.tensor(sample.data["continuation"])
        reference = run.prefill.full_logits(continuation, self.step)
        with fused_attention(run.prefill.model):
            logits = run.forced(continuation, self.step, sample.data["passes"])
        _, kl, _ = compare_tokens(reference, logits, continuation)
        tokens = sample.prompt.shape[1] + sample.question.shape[1]
        return {"case": sample.data["case"], "texts": sample.data["texts"], "tokens": tokens, "kl": kl.mean().item()}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        return scores_by("case", records, kl_scores)


def _passes(case: str) -> list[list[int]]:
    """Tokens of each forward pass of each part."""
    parts = case.removesuffix(_LIKE).split("+")
    return [[1] * int(part[:-1]) if part.endswith("s") else [int(part)] for part in parts]


def _tokens_by_text(plan: Sequence[tuple[int, int]]) -> Counter[int]:
    return sum((Counter({text: tokens}) for text, tokens in plan), Counter[int]())
