"""lm-eval's scored answers and rolling perplexity, each token read with its context in a compressed cache.

Run by `benchmarks/experiments.py`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT
from kvcache_compress.modeling.loading import load_model

CACHES = ("full", "turboquant-4bit", "turboquant-2bit", "kivi-2bit", "turboquant-paper-2.5bit")
CHOICES = 4
STEPS = {"choice": 1, "rolling": 16}
"""Tokens per forward pass by task: of an answer, and of a text."""


def likelihood(
    text: Annotated[Path, typer.Option(help="Text that contexts and answers are cut from.")] = DEFAULT_TEXT,
    model: Annotated[str, typer.Option(help="Model: smollm2-135m, a hub id or a folder.")] = "smollm2-135m",
    questions: int = 12,
    context: Annotated[int, typer.Option(help="Words of a context.")] = 400,
    answer: Annotated[int, typer.Option(help="Words of an answer.")] = 10,
    rolling: Annotated[int, typer.Option(help="Words of the text whose perplexity is measured.")] = 1400,
    window: Annotated[int, typer.Option(help="Most tokens of a pass, so of a rolling window.")] = 1024,
) -> dict[str, Any]:
    """Choices among four words and a text's perplexity by lm-eval: in one pass, and through caches token by token."""
    from datasets import disable_progress_bars
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from kvcache_compress.eval.runner.harness import CachedLM

    logging.disable(logging.WARNING)
    disable_progress_bars()
    loaded, tokenizer = load_model(model)
    words = text.read_text(encoding="utf-8").split()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _write_task(Path(folder), "choice", continuations(words, questions, context, answer))
        _write_task(Path(folder), "rolling", [{"text": " ".join(words[:rolling])}])
        tasks = TaskManager(include_path=folder, include_defaults=False)
        options = {"pretrained": loaded, "tokenizer": tokenizer, "max_length": window}
        for cache in ("", *CACHES):
            row: dict[str, Any] = {"cache": cache or None}
            for task, step in STEPS.items():
                lm = CachedLM(cache=cache, step=step, **options) if cache else HFLM(**options)
                found = simple_evaluate(lm, tasks=[task], task_manager=tasks, bootstrap_iters=0)
                samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
                if task == "choice":
                    row["labels"] = [sample["target"] for sample in samples]
                    row["scores"] = [[round(one[0], 4) for one in sample["filtered_resps"]] for sample in samples]
                    row["packed_tokens"] = min(lm.packed_tokens) if cache else None
                else:
                    row["word_perplexity"] = found["results"][task]["word_perplexity,none"]
            rows.append(row)
    sizes = {"questions": questions, "context_words": context, "answer_words": answer, "rolling_words": rolling}
    return {"model": Path(loaded.name_or_path).name, "text": text.name, **sizes, "window": window, "rows": rows}


def continuations(words: list[str], questions: int, context: int, answer: int) -> list[dict[str, Any]]:
    """Contexts, evenly spread over a text, each with the words that follow it and those that follow the next three.

    Raises:
        ValueError: too few words.
    """
    space = len(words) - context - answer
    if space < questions * answer:
        raise ValueError(f"questions={questions}: the text of {len(words)} words allows fewer")
    starts = [space * number // questions for number in range(questions)]
    following = [" ".join(words[start + context : start + context + answer]) for start in starts]
    rows = []
    for number, start in enumerate(starts):
        label = number % CHOICES
        choices = [following[(number + later) % questions] for later in range(1, CHOICES)]
        choices.insert(label, following[number])
        rows.append({"text": " ".join(words[start : start + context]), "choices": choices, "label": label})
    return rows


def _write_task(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a local task of lm-eval: one of `choices`, if the rows have some, else the perplexity of `text`."""
    data = folder / f"{name}.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kind: dict[str, Any] = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    kind["metric_list"] = [{"metric": "word_perplexity"}]
    if "choices" in rows[0]:
        kind = {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": "{{label}}"}
        kind |= {"doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder)}}
    task = {"task": name, "test_split": "test"} | source | kind
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
