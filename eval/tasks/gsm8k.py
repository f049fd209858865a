"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): word problems after solved examples.

The solved examples (few-shot chain of thought) are the prompt of all samples, and are compressed. Question and answer
go through the cache. Small models solve almost none of the problems, so `likelihood` asks instead how probable the
reference solution is.

    kvcache-compress eval gsm8k --data train.jsonl --scoring likelihood --cache turboquant-2bit
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.validation import AnyPath

from .benchmark import Benchmark, Record, Sample, register_benchmark
from .samples import check_fits, force_answer, generate_text, load_hub_rows, make_sample, read_jsonl, split_ids

Scoring = Literal["generate", "likelihood"]

HUB_ID = "openai/gsm8k"
INTRODUCTION = "Solve each problem step by step, and end with the result after ####.\n\n"

_COLUMNS = ("question", "answer")
_CALCULATION = re.compile(r"<<.*?>>")
_NUMBER = re.compile(r"((?:(?<![\w.)])-)?)\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")


@register_benchmark("gsm8k")
class Gsm8k(Benchmark):
    """GSM8K's word problems after a few solved examples.

    The examples are the first rows of the file `data`, which are then not asked, or of the hub's train split.
    `scoring="generate"` checks the number in the model's answer. `"likelihood"` measures the probability of the
    reference solution.
    """

    data: AnyPath | None = Field(
        default=None, description="A .jsonl file with question and answer; openai/gsm8k on the hub by default."
    )
    split: Literal["train", "test"] = Field(default="test", description="Split of the hub's data set to ask.")
    shots: int = Field(default=8, ge=0, description="Solved examples, from the first rows.")
    scoring: Scoring = Field(
        default="generate", description="Compare the number in the answer, or the likelihood of the reference."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens to generate.")
    cached_question: bool = Field(
        default=True, description="Feed the question through the cache under test, instead of prefilling it."
    )

    @property
    def main_score(self) -> str:
        return "accuracy" if self.scoring == "generate" else "answer_logprob"

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        examples, rows, start = self._rows()
        solved = INTRODUCTION + "".join(f"{question_text(row)} {solution(row)}\n\n" for row in examples)
        samples = []
        for number, row in enumerate(rows[: self.limit], start=start):
            where = f"{self.data or HUB_ID}, row {number}"
            chain, mark, result = solution(row).rpartition("####")
            if not mark:
                raise ValueError(f"{where}: no #### before the result in answer={row['answer']!r}")
            answer = [f" {chain}{mark}", result] if self.scoring == "likelihood" else []
            shot_ids, question_ids, *forced = split_ids(tokenizer, [solved, question_text(row), *answer])
            new = sum(map(len, forced)) or self.max_new_tokens
            check_fits(model, len(shot_ids) + len(question_ids) + new, f"{where}, after {self.shots} examples")
            data = {"result": result.strip(), **dict(zip(("chain_ids", "number_ids"), forced, strict=False))}
            samples.append(make_sample(str(number), shot_ids, question_ids, data, cached_question=self.cached_question))
        return samples

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        if self.scoring == "likelihood":
            chain_ids = sample.data["chain_ids"]
            answer = force_answer(run, [*chain_ids, *sample.data["number_ids"]])
            return {
                "answer_logprob": answer.logprob,
                "number_logprob": answer.logprobs[len(chain_ids) :].mean().item(),
                "number_exact": float(answer.greedy[len(chain_ids) :].all()),
            }
        text = generate_text(run, tokenizer, self.max_new_tokens).split("Question:")[0]  # it may ask itself the next
        number = extract_number(text)
        right = number is not None and number == extract_number(sample.data["result"])
        return {"score": float(right), "number": None if number is None else str(number), "text": text}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Share of right numbers; or log-probabilities of solution and number, and share of numbers predicted."""
        if self.scoring == "generate":
            return {"accuracy": statistics.fmean(record["score"] for record in records)}
        names = ("answer_logprob", "number_logprob", "number_exact")
        return {name: statistics.fmean(record[name] for record in records) for name in names}

    def _rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
        """The solved examples, the rows to ask, and the number of the first of these rows in its file."""
        if self.data is None:
            examples = load_hub_rows(HUB_ID, "main", "train", _COLUMNS)[: self.shots] if self.shots else []
            skipped = len(examples) if self.split == "train" else 0
            return examples, load_hub_rows(HUB_ID, "main", self.split, _COLUMNS)[skipped:], skipped + 1
        rows = read_jsonl(self.data, _COLUMNS)
        if len(rows) <= self.shots:
            raise ValueError(f"shots={self.shots}: must be below {len(rows)}, the number of rows in {self.data}")
        return rows[: self.shots], rows[self.shots :], self.shots + 1


def question_text(row: dict[str, Any]) -> str:
    """The prompt for a row's question, up to the start of the answer."""
    return f"Question: {row['question'].strip()}\nAnswer:"


def solution(row: dict[str, Any]) -> str:
    """A row's reference solution without calculator annotations."""
    return _CALCULATION.sub("", row["answer"]).strip()


def extract_number(text: str) -> Decimal | None:
    """The result of a solution: the first number after ####, else the last number of all.

    Commas, dollar signs and trailing zeros do not matter: `$1,200.00` equals `1200`.
    """
    _, mark, result = text.partition("####")
    numbers = _NUMBER.findall(result) if mark else []
    if not numbers:
        numbers = _NUMBER.findall(text)[-1:]
    if not numbers:
        return None
    sign, digits = numbers[0]
    return Decimal(sign + digits.replace(",", ""))
