"""LongBench and LongBench-E with any cache.

    kvcache-compress eval longbench --task multi_news --data longbench/ --cache turboquant-4bit --output FILE

Published figures need the benchmark's own prompts (`--prompts`); the default ones are worded differently.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun, positions_of
from kvcache_compress.eval.tasks.benchmark import Benchmark, Record, Sample
from kvcache_compress.eval.tasks.samples import force_answer, generate_text, make_sample, text_ids, with_space
from kvcache_compress.validation import AnyPath, AnyTuple

from .data import TASKS, Row, Task, Version, load_rows
from .prompts import encode_prompt, fill, read_templates
from .scores import aggregate, best_score, first_line

ChatTemplate = Literal["auto", "on", "off"]


class LongBench(Benchmark):
    """LongBench and LongBench-E: long documents with questions, summaries, examples and code.

    By Bai et al., 2023. `limit` counts rows of each task. `data.resolve_tasks` explains `tasks`, and
    `data.load_rows` explains `data`. `chat_template="auto"` uses the tokenizer's template if it has one, but never for
    few-shot and code, as in the benchmark.
    """

    kind: ClassVar[str] = "longbench"
    main_score: ClassVar[str] = "average"

    limit: int | None = Field(default=None, ge=1, description="Most rows of each task to take; all by default.")
    version: Version = Field(default="v1", description="LongBench, or LongBench-E (even lengths).")
    tasks: AnyTuple[str] = Field(default=(), description="Task, group, en or zh; all by default.")
    data: AnyPath | None = Field(default=None, description="Folder or file of .jsonl; the hub's dataset by default.")
    prompts: AnyPath | None = Field(
        default=None, description="The benchmark's dataset2prompt.json; our own prompts by default."
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Longer prompts lose their middle; the model's positions by default."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Tokens to generate; set by the task by default."
    )
    chat_template: ChatTemplate = Field(
        default="auto", description="Tokenizer's chat template; auto: not for few-shot and code."
    )
    cached_question: bool = Field(
        default=False, description="Feed what follows the context through the cache under test. The papers prefill it."
    )

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The first `limit` rows of each task."""
        rows = load_rows(self.data, self.version, self.tasks)
        rows = [row for row in rows if self.limit is None or row.number < self.limit]
        templates = read_templates(self.prompts, list(dict.fromkeys(row.task for row in rows)))
        return [self._sample(row, templates, tokenizer, positions_of(model)) for row in rows]

    def _sample(
        self, row: Row, templates: dict[Task, str], tokenizer: PreTrainedTokenizerBase, positions: int | None
    ) -> Sample:
        new = self.max_new_tokens or row.task.max_new_tokens
        available = None if positions is None else positions - new
        limit = self.max_prompt_tokens or available
        if available is not None and limit is not None and not 1 <= limit <= available:
            raise ValueError(
                f"max_prompt_tokens={limit} and {new} new tokens must fit into the model's {positions} positions"
            )
        has_template = bool(getattr(tokenizer, "chat_template", None))
        chat = self.chat_template == "on" or (self.chat_template == "auto" and has_template and row.task.chat)
        before, after = fill(templates[row.task], row.context, row.input)
        prompt, question, cut = encode_prompt(
            tokenizer, before, after, chat=chat, limit=limit, split=self.cached_question
        )
        spaced = not chat and row.task.language != "zh"
        answer = with_space(after, row.answers[0]) if spaced else row.answers[0]
        data = {
            "task": row.task.name,
            "answers": list(row.answers),
            "answer_ids": text_ids(tokenizer, answer, special=False)[:new],
            "classes": list(row.classes),
            "labels": [] if row.band is None else [row.band],
            "max_new_tokens": new,
            "cut": cut,
        }
        return make_sample(f"{row.task.name}/{row.number}", prompt, question, data, cached_question=True)

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        """Generate greedily, and keep the best score over all right answers. Another cache is fed the first of them.

        The record has `task`, `labels` (the length band of LongBench-E), `prediction`, `score` (0 to 1), `logprob` (of
        a token of the right answer, in nats) and `cut` (tokens of the prompt that were left out).
        """
        data = sample.data
        task = TASKS[data["task"]]
        # As in the benchmark, a line's end stops samsum, where models would go on with another dialogue; but the first
        # token may not be an end.
        dialogue = task.name == "samsum"
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:] if dialogue else []
        prediction = generate_text(
            run, tokenizer, data["max_new_tokens"], more_ends=newline, min_new_tokens=int(dialogue)
        )
        counted = first_line(prediction) if task.first_line else prediction
        score = best_score(task.metric, counted, data["answers"], data["classes"])
        about = {"task": task.name, "labels": list(data["labels"]), "cut": data["cut"]}
        logprobs, _ = force_answer(run.prefill.run(run.spec), data["answer_ids"])
        return {**about, "prediction": prediction, "score": score, "logprob": logprobs.mean().item()}

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Scores in per cent, and `logprob`, the mean over tasks, and `logprob.TASK` in nats.

        v1 has `average` over tasks, the groups and `group_average` (see `scores.aggregate`), and `GROUP.TASK`. E has
        also `average.BAND` over tasks, and `GROUP.TASK.BAND`.
        """
        labels = sorted({label for record in records for label in record["labels"]})
        means = _task_means(records)
        scores = aggregate(means) | {f"{TASKS[task].group}.{task}": mean for task, mean in means.items()}
        for label in labels:
            of_band = _task_means(record for record in records if label in record["labels"])
            scores[f"average.{label}"] = statistics.fmean(of_band.values())
            scores |= {f"{TASKS[task].group}.{task}.{label}": mean for task, mean in of_band.items()}
        logprobs = _task_means(records, "logprob", 1)
        scores["logprob"] = statistics.fmean(logprobs.values())
        return scores | {f"logprob.{task}": mean for task, mean in logprobs.items()}


def _task_means(records: Iterable[Record], key: str = "score", scale: float = 100) -> dict[str, float]:
    of_task: dict[str, list[Record]] = {}
    for record in records:
        of_task.setdefault(record["task"], []).append(record)
    return {task: scale * statistics.fmean(record[key] for record in members) for task, members in of_task.items()}
