"""LongBench, LongBench-E and LongBench v2 with any cache.

    python -mkvcache_compress.eval longbench --task multi_news --data longbench/ --cache turboquant-4bit --output DIR

Prompts are ours unless the benchmark's own are given, which published numbers rest on (`--prompts`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import typer
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_compress.eval.caches.prefill import CacheRun
from kvcache_compress.eval.cli.command import (
    DEFAULT_CACHES,
    DEFAULT_MODEL,
    CacheOption,
    CodebooksOption,
    DeviceOption,
    DtypeOption,
    FusedOption,
    LimitOption,
    ModelOption,
    OutputOption,
    SeedOption,
    measure,
)
from kvcache_compress.eval.tasks.benchmark import Benchmark, Record, Sample, register_benchmark
from kvcache_compress.eval.tasks.samples import generate_text
from kvcache_compress.validation.options import AnyPath, AnyTuple

from .data import TASKS, V2, Row, Task, Version, load_rows
from .prompts import Template, encode_prompt, read_templates
from .scores import aggregate, best_score, first_line

ChatTemplate = Literal["auto", "on", "off"]


@register_benchmark("longbench")
class LongBench(Benchmark):
    """Long documents with questions, summaries, examples and code (Bai et al., 2023 and 2024).

    Attributes:
        limit: rows of each task at most, from the first on.
        version: `v1`, `e` (lengths spread evenly) or `v2` (multiple choice).
        tasks: names of tasks or groups, `en` or `zh`; all if empty. See `longbench_data.resolve_tasks`.
        data: folder, file or hub dataset; see `longbench_data.load_rows`.
        prompts: file of templates; ours when None. Rows that are ready formatted need none.
        max_prompt_tokens: longer prompts lose their middle; the model's positions minus the generation when None.
        max_new_tokens: instead of each task's own.
        chat_template: `auto`: where the tokenizer has one, but never for few-shot and code, as in the benchmark;
            `on`: for all tasks; `off`: for none.
        cached_question: everything after the context goes through the cache under test, instead of being prefilled with
            the context as in the papers.
    """

    main_score: ClassVar[str] = "average"
    limits_itself: ClassVar[bool] = True

    version: Version = "v1"
    tasks: AnyTuple[str] = ()
    data: str | None = None
    prompts: AnyPath | None = None
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    chat_template: ChatTemplate = "auto"
    cached_question: bool = False

    def samples(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The first `limit` rows of each task.

        Raises:
            ValueError: data, tasks or prompts that `load_rows` or `read_templates` refuse; no room for a prompt.
            OSError: the hub cannot be reached.
        """
        rows = load_rows(self.data, self.version, self.tasks)
        rows = [row for row in rows if self.limit is None or row.number < self.limit]
        unformatted = list(dict.fromkeys(row.task for row in rows if row.ready is None))
        templates = read_templates(self.prompts, unformatted)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        return [self._sample(row, templates, tokenizer, positions) for row in rows]

    def _sample(
        self, row: Row, templates: dict[Task, Template], tokenizer: PreTrainedTokenizerBase, positions: int | None
    ) -> Sample:
        new = self.max_new_tokens or row.max_new_tokens or row.task.max_new_tokens
        room = None if positions is None else positions - new
        limit = self.max_prompt_tokens or room
        if room is not None and limit is not None and not 1 <= limit <= room:
            raise ValueError(
                f"max_prompt_tokens={limit} and {new} new tokens: allowed are {positions} in all, the model's positions"
            )
        has_template = bool(getattr(tokenizer, "chat_template", None))
        chat = self.chat_template == "on" or (self.chat_template == "auto" and has_template and row.task.chat)
        before, after = row.ready or templates[row.task].fill(row.fields)
        encoded = encode_prompt(tokenizer, before, after, chat=chat, limit=limit, split=self.cached_question)
        data = {
            "task": row.task.name,
            "answers": list(row.answers),
            "classes": list(row.classes),
            "labels": list(row.labels),
            "max_new_tokens": new,
            "cut": encoded.cut,
        }
        prompt, question = (torch.tensor([ids], dtype=torch.long) for ids in (encoded.prompt, encoded.question))
        return Sample(id=f"{row.task.name}/{row.number}", prompt=prompt, data=data, question=question)

    def score(self, run: CacheRun, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Record:
        """Greedy generation up to the model's end token, and the best score over all right answers.

        The record has `task`, `labels` (length band, or difficulty and length), `prediction`, `score` (0 to 1) and
        `cut` (tokens of the prompt that were left out).
        """
        data = sample.data
        task = V2 if data["task"] == V2.name else TASKS[data["task"]]
        # samsum: as in the benchmark, since models would go on with another dialogue; the first token may not end it.
        dialogue = task.name == "samsum"
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:] if dialogue else []
        prediction = generate_text(
            run, tokenizer, data["max_new_tokens"], more_ends=newline, min_new_tokens=int(dialogue)
        )
        counted = first_line(prediction) if task.first_line else prediction
        score = best_score(task.metric, counted, data["answers"], data["classes"])
        return {
            "task": task.name,
            "labels": list(data["labels"]),
            "prediction": prediction,
            "score": score,
            "cut": data["cut"],
        }

    def summarize(self, records: Sequence[Record]) -> dict[str, float]:
        """Scores in per cent.

        v1: `average` over tasks, the groups, `group_average` (see `longbench_scores.aggregate`), and `GROUP.TASK`. E:
        also `average.BAND` over tasks, and `GROUP.TASK.BAND`. v2: `average` over questions, and over those of each
        difficulty and length.
        """
        labels = sorted({label for record in records for label in record["labels"]})
        if self.version == "v2":
            of_label = {label: [record for record in records if label in record["labels"]] for label in labels}
            return {"average": _mean(records), **{label: _mean(members) for label, members in of_label.items()}}
        means = _task_means(records)
        scores = aggregate(means) | {f"{TASKS[task].group}.{task}": mean for task, mean in means.items()}
        for label in labels:
            of_band = _task_means(record for record in records if label in record["labels"])
            scores[f"average.{label}"] = statistics.fmean(of_band.values())
            scores |= {f"{TASKS[task].group}.{task}.{label}": mean for task, mean in of_band.items()}
        return scores


def _mean(records: Sequence[Record]) -> float:
    return 100 * statistics.fmean(record["score"] for record in records)


def _task_means(records: Iterable[Record]) -> dict[str, float]:
    of_task: dict[str, list[Record]] = {}
    for record in records:
        of_task.setdefault(record["task"], []).append(record)
    return {task: _mean(members) for task, members in of_task.items()}


app = typer.Typer(add_completion=False)


@app.command()
def main(
    cache: CacheOption = DEFAULT_CACHES,
    model: ModelOption = DEFAULT_MODEL,
    version: Annotated[Version, typer.Option(help="e is LongBench-E")] = "v1",
    task: Annotated[list[str], typer.Option(help="task, group, en or zh; repeatable; all without it")] = [],  # noqa: B006
    data: Annotated[str | None, typer.Option(help="folder or file of .jsonl, or a dataset of the hub")] = None,
    prompts: Annotated[Path | None, typer.Option(help="the benchmark's dataset2prompt.json; ours without it")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="longer prompts lose their middle", min=1)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="instead of each task's own", min=1)] = None,
    chat_template: Annotated[ChatTemplate, typer.Option(help="auto: not for few-shot and code")] = "auto",
    cached_question: Annotated[
        bool, typer.Option("--cached-question", help="the question, too, goes through the cache under test")
    ] = False,
    limit: LimitOption = None,
    codebooks: CodebooksOption = None,
    output: OutputOption = None,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    fused: FusedOption = False,
) -> None:
    """LongBench's tasks, LongBench-E's or v2's; `--limit` counts rows of each task."""
    options = {
        "version": version,
        "tasks": tuple(task),
        "data": data,
        "prompts": prompts,
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "chat_template": chat_template,
        "cached_question": cached_question,
        "limit": limit,
    }
    measure(
        "longbench",
        options,
        model=model,
        cache=cache,
        codebooks=codebooks,
        output=output,
        seed=seed,
        dtype=dtype,
        device=device,
        fused=fused,
    )


if __name__ == "__main__":
    app()
