"""Needle in a haystack: a sentence is hidden in a long text and asked for, over a grid of lengths and depths.

`needle` mode asks for a sentence and measures the recall of its words (ROUGE-1), as is usual for G. Kamradt's "Needle
In A Haystack" without a language model as judge. `passkey` mode asks for random digits (Mohtashami and Jaggi 2023,
"Landmark Attention", section 4.2), which models of 100 million parameters can find.

    kvcache-compress eval needle --mode passkey --length 1024 --length 4096 --cache turboquant-2bit
"""

import bisect
import itertools
import random
import re
import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.validation import AnyList, AnyPath, Seed, require

from .benchmark import Benchmark, Record, Sample
from .haystack import haystack_words, hide
from .samples import as_chat, force_answer, generate_text, make_sample, split_ids, text_ids, too_long, with_space

Mode = Literal["needle", "passkey"]
Scoring = Literal["generate", "forced"]

LENGTHS = [1024, 2048, 4096]
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
INTRODUCTION = "Read this text carefully: one sentence in it answers the question at its end.\n\n"


class Wording(NamedTuple):
    """A needle that contains `{answer}`, the question, the answer (None for random digits), and the reply's start."""

    needle: str
    question: str
    answer: str | None
    answer_prefix: str


WORDINGS: dict[Mode, Wording] = {
    "needle": Wording(
        "The signal for the ship at anchor is {answer}.",
        "What is the signal for the ship at anchor?",
        "one green lantern over two white flags",
        "The signal for the ship at anchor is",
    ),
    "passkey": Wording("The pass key is number {answer}.", "What is the pass key?", None, "The pass key is number"),
}


class Needle(Benchmark):
    """A sentence or a pass key hidden in long texts and asked for, over a grid of lengths and depths.

    A prompt has as many tokens as its length, or a few less because it is cut at a word. Lengths beyond the model's
    positions are skipped and named. The needle goes between two sentences. Repeats have other haystacks and pass keys.

    `scoring="generate"` (the default for a needle) judges the text that the model writes. `"forced"` (the default for a
    pass key) tests whether each token of the answer is the most likely one, and averages log-probabilities.
    """

    kind: ClassVar[str] = "needle"
    main_score: ClassVar[str] = "recall"

    mode: Mode = Field(default="needle", description="Hide a sentence, or random digits.")
    lengths: AnyList[Annotated[int, Field(ge=1)]] = Field(
        default=LENGTHS, min_length=1, description="Tokens of the whole prompt."
    )
    depths: AnyList[Annotated[float, Field(ge=0, le=1)]] = Field(
        default=DEPTHS, min_length=1, description="Depth of the needle, from 0 (start) to 1 (end)."
    )
    haystack: AnyPath | None = Field(
        default=None, description="Folder of .txt files; sentences made from the seed by default."
    )
    digits: int = Field(default=5, ge=1, le=1000, description="Digits of a pass key.")
    repeats: int = Field(default=1, ge=1, le=10_000, description="Samples per length and depth.")
    seed: Seed = Field(default=0, description="Random seed of haystacks and pass keys.")
    chat_template: bool = Field(default=False, description="Put the prompt into the tokenizer's chat template.")
    scoring: Scoring | None = Field(
        default=None,
        description="Judge generated text, or the likelihood of the answer; forced by default for a pass key.",
    )
    max_new_tokens: int = Field(default=32, ge=1, description="Tokens to generate.")
    cached_question: bool = Field(
        default=True, description="Feed the question through the cache under test, instead of prefilling it."
    )

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        fitting = [length for length in self.lengths if self._length_problem(model, length) is None]
        if not fitting:
            raise ValueError("; ".join(self.skipped(model)))
        places = itertools.product(range(self.repeats), fitting, self.depths)
        return [self._sample(tokenizer, *place) for place in itertools.islice(places, self.limit)]

    def skipped(self, model: PreTrainedModel) -> list[str]:
        return [why for length in self.lengths if (why := self._length_problem(model, length)) is not None]

    def _length_problem(self, model: PreTrainedModel, length: int) -> str | None:
        return too_long(model, length + self.max_new_tokens, f"lengths={length}")

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        place = {"length": sample.data["length"], "depth": sample.data["depth"]}
        if self._scoring == "forced":
            logprobs, exact = force_answer(run, sample.data["answer_ids"])
            return {**place, "score": float(exact), "logprob": logprobs.mean().item()}
        text = generate_text(run, tokenizer, self.max_new_tokens)
        judge = passkey_found if self.mode == "passkey" else word_recall
        return {**place, "score": judge(sample.data["answer"], text), "text": text}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Mean recall, mean log-probability of forced answers, and both by length."""
        scores = {}
        for name, key in {"recall": "score", "logprob": "logprob"}.items():
            if key in records[0]:
                scores[name] = statistics.fmean(record[key] for record in records)
                for length in sorted({record["length"] for record in records}):
                    scores[f"{name}.{length}"] = statistics.fmean(r[key] for r in records if r["length"] == length)
        return scores

    @property
    def _scoring(self) -> Scoring:
        return self.scoring or ("forced" if self.mode == "passkey" else "generate")

    def _sample(self, tokenizer: PreTrainedTokenizerBase, repeat: int, length: int, depth: float) -> Sample:
        wording = WORDINGS[self.mode]
        chance = random.Random(f"{self.seed},{length},{depth},{repeat}")
        answer = wording.answer or str(chance.randrange(10 ** (self.digits - 1), 10**self.digits))
        needle = wording.needle.replace("{answer}", answer)
        words = haystack_words(self.haystack, length, f"{self.seed},{repeat}")  # a word has at least one token
        special = not self.chat_template

        def parts(count: int) -> tuple[str, str]:
            """The prompt with `count` words of the haystack, split before the question."""
            context = f"{INTRODUCTION}{hide(needle, words[:count], depth)}\n\n"
            if self.chat_template:
                return as_chat(tokenizer, context, wording.question, wording.answer_prefix)
            return context, f"{wording.question} {wording.answer_prefix}"

        def tokens(count: int) -> int:
            return len(text_ids(tokenizer, "".join(parts(count)), special=special))

        count = bisect.bisect_right(range(1, len(words) + 1), length, key=tokens)
        while count and tokens(count) > length:  # one more word can move the needle, and so save a token elsewhere
            count -= 1
        if not count:
            raise ValueError(f"lengths={length}: must be at least {tokens(1)} for needle, question and one word")
        context, question = parts(count)
        answers = [with_space(question, answer)] if self._scoring == "forced" else []
        prompt_ids, question_ids, *forced = split_ids(tokenizer, [context, question, *answers], special=special)
        data = {"length": length, "depth": depth, "answer": answer, **({"answer_ids": forced[0]} if forced else {})}
        name = f"{length},{depth:g},{repeat}"
        return make_sample(name, prompt_ids, question_ids, data, cached_question=self.cached_question)


def word_recall(answer: str, text: str) -> float:
    """Share of the answer's words that occur in a text: ROUGE-1 recall, case-insensitive."""
    scorer = require("rouge_score.rouge_scorer", "recalls of words", "rouge-score")
    return scorer.RougeScorer(["rouge1"]).score(answer, text)["rouge1"].recall


def passkey_found(answer: str, text: str) -> float:
    """1 if a text contains these digits as a whole number, else 0."""
    return float(answer in re.findall(r"\d+", text))
