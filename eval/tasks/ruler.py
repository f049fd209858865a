"""RULER (Hsieh et al. 2024, arXiv 2404.06654) from its public files: retrieval, tracing, aggregation, questions.

The files are those that RULER's own scripts write: a JSON object per line with a whole prompt, in `index`, `input`,
`outputs`, `length`, and in later versions `answer_prefix`. Answers are scored as in RULER, by the references that occur
in them, case-insensitively: the share of all of them or, for questions, any.

    kvcache-compress eval ruler --data niah_multikey_3-4096.jsonl --scoring forced --cache turboquant-2bit
"""

import re
import statistics
from collections.abc import Sequence
from itertools import chain, zip_longest
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.validation import AnyPath, quoted

from .benchmark import Benchmark, Record, Sample
from .samples import as_chat, force_answer, generate_text, make_sample, read_jsonl, split_ids, too_long, with_space

Task = Literal["niah", "vt", "cwe", "fwe", "qa"]
Scoring = Literal["generate", "forced"]

NEW_TOKENS: dict[Task, int] = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens to generate by kind of task, as in RULER's own scripts."""

_TASK = re.compile(r"(?<![a-z])(niah|vt|cwe|fwe|qa)(?![a-z])")
_COLUMNS = ("index", "input", "outputs", "length")


class Ruler(Benchmark):
    """RULER, from files in its public format.

    Without `task`, a file's name (`niah_multikey_3-4096.jsonl`) or its folder's (`vt/validation.jsonl`) tells the kind
    of task. `scoring="generate"` judges the text that the model writes. `"forced"` tests whether each token of the
    reference is the most likely one, and averages log-probabilities; it needs tasks with a single reference. Files
    written with a model's chat template need no `chat_template`. `limit` counts rows of each file.
    """

    kind: ClassVar[str] = "ruler"
    limit: int | None = Field(default=None, ge=1, description="Most rows of each file to take; all by default.")
    data: AnyPath = Field(description="A .jsonl file, or a folder searched for them with its subfolders.")
    task: Task | None = Field(default=None, description="Kind of task, where file names do not tell it.")
    scoring: Scoring = Field(default="generate", description="Judge generated text, or the reference's likelihood.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Tokens to generate; RULER's own number per task by default."
    )
    chat_template: bool = Field(default=False, description="Put the input into the tokenizer's chat template.")
    cached_question: bool = Field(
        default=True, description="Feed the question through the cache under test, instead of prefilling it."
    )

    @property
    def main_score(self) -> str:
        return "accuracy" if self.scoring == "generate" else "logprob"

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Samples of all files, interleaved."""
        per_file = [self._read(path, model, tokenizer) for path in self._files()]
        return [sample for sample in chain.from_iterable(zip_longest(*per_file)) if sample is not None]

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        about = {"task": sample.data["task"], "length": sample.data["length"]}
        if self.scoring == "forced":
            logprobs, exact = force_answer(run, sample.data["answer_ids"])
            return {**about, "score": float(exact), "logprob": logprobs.mean().item()}
        text = generate_text(run, tokenizer, sample.data["max_new_tokens"])
        judge = string_match_part if sample.data["kind"] == "qa" else string_match_all
        return {**about, "score": judge(text, sample.data["references"]), "text": text}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Accuracy, or log-probability too, averaged over tasks as in the paper, and for each task."""
        scores = {}
        for name, key in {"accuracy": "score", "logprob": "logprob"}.items():
            if key in records[0]:
                tasks = sorted({record["task"] for record in records})
                means = {task: statistics.fmean(r[key] for r in records if r["task"] == task) for task in tasks}
                scores[name] = statistics.fmean(means.values())
                scores.update({f"{name}.{task}": mean for task, mean in means.items()})
        return scores

    def _files(self) -> list[Path]:
        if not (isdir(self.data) or isfile(self.data)):
            raise ValueError(f"data={quoted(str(self.data))}: no such file or folder")
        if not isdir(self.data):
            return [self.data]
        if not (files := sorted(self.data.rglob("*.jsonl"))):
            raise ValueError(f"data={str(self.data)!r}: no .jsonl files in this folder")
        return files

    def _read(self, path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Samples of one file."""
        task, kind = self._named(path)
        name = path.relative_to(self.data).with_suffix("").as_posix() if self.data.is_dir() else path.stem
        samples = []
        for number, row in enumerate(read_jsonl(path, _COLUMNS)[: self.limit], start=1):
            where = f"{path}, row {number}"
            references = row["outputs"]
            forced_only = self.scoring == "forced"
            if not isinstance(references, list) or not references or (forced_only and len(references) > 1):
                wanted = "one text" if forced_only else "at least one text"
                raise ValueError(
                    f"{where}: outputs={quoted(references)} must be a list of {wanted} with scoring={self.scoring}"
                )
            *parts, answers = self._parts(tokenizer, row)
            prompt_ids, question_ids, *forced = split_ids(tokenizer, [*parts, *answers], special=not self.chat_template)
            data = {
                "task": task,
                "kind": kind,
                "length": row["length"],
                "references": [str(reference) for reference in references],
                "max_new_tokens": self.max_new_tokens or NEW_TOKENS[kind],
                **({"answer_ids": forced[0]} if forced else {}),
            }
            new = len(forced[0]) if forced else data["max_new_tokens"]
            if problem := too_long(model, len(prompt_ids) + len(question_ids) + new, where):
                raise ValueError(problem)
            samples.append(
                make_sample(f"{name}/{number}", prompt_ids, question_ids, data, cached_question=self.cached_question)
            )
        return samples

    def _named(self, path: Path) -> tuple[str, Task]:
        """The task's name in scores, and its kind."""
        for name in (path.stem, path.parent.name):
            if match := _TASK.search(name.lower()):
                return name, self.task or cast(Task, match[1])
        if self.task is None:
            kinds = ", ".join(NEW_TOKENS)
            raise ValueError(f"data={quoted(str(path))}: the name does not tell the task; set task to one of {kinds}")
        return path.stem, self.task

    def _parts(self, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> tuple[str, str, list[str]]:
        """The context, the question, and the reference if it is forced."""
        context, question = split_question(row["input"])
        prefix = row.get("answer_prefix") or ""
        if self.chat_template:
            context, question = as_chat(tokenizer, context, question, prefix.lstrip())
        else:
            question += prefix
        return context, question, [with_space(question, str(row["outputs"][0]))] if self.scoring == "forced" else []


def split_question(text: str) -> tuple[str, str]:
    """Split an input before the last line that starts like a question of RULER's, else before its last line."""
    starts = [match.end() for match in re.finditer(r"\n(?=Question:|What (?:is|are) )", text)]
    start = starts[-1] if starts else text.rstrip().rfind("\n") + 1
    return text[:start], text[start:]


def string_match_all(text: str, references: Sequence[str]) -> float:
    """Share of the references that occur in a text, case-insensitively (RULER's `string_match_all`)."""
    return statistics.fmean(reference.lower() in text.lower() for reference in references)


def string_match_part(text: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in a text, case-insensitively (RULER's `string_match_part`), else 0."""
    return float(any(reference.lower() in text.lower() for reference in references))
