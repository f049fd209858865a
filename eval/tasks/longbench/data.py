"""LongBench's tasks, and their rows from files or from the hub.

LongBench (Bai et al., 2023, arXiv:2308.14508) has 21 tasks; LongBench-E takes 13 of them with lengths spread evenly;
LongBench v2 (Bai et al., 2024, arXiv:2412.15204) is one multiple choice with contexts up to two million words.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Literal

from kvcache_compress.eval.tasks.samples import check_columns, check_hub, read_jsonl
from kvcache_compress.files.text import parse_json, read_text
from kvcache_compress.validation import quoted, require

Version = Literal["v1", "e", "v2"]

HUB = {"v1": "zai-org/LongBench", "e": "zai-org/LongBench", "v2": "zai-org/LongBench-v2"}
"""Default datasets of the hub."""


@dataclass(frozen=True)
class Task:
    """One task, as the benchmark defines it.

    Attributes:
        name: the benchmark's.
        group: one of the six of its tables; `multiple_choice` for v2.
        metric: a key of `scores.METRICS`.
        max_new_tokens: tokens generated.
        language: `en` or `zh`.
        chat: an instruction for the model's chat template; the other tasks are continued as plain text.
        first_line: only the first line of the prediction counts, as models go on with further examples.
        in_e: also in LongBench-E.
    """

    name: str
    group: str
    metric: str
    max_new_tokens: int
    language: str = "en"
    chat: bool = True
    first_line: bool = False
    in_e: bool = False


_EXAMPLES: dict[str, Any] = {"chat": False, "first_line": True}
_CODE: dict[str, Any] = {"chat": False, "in_e": True}
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("narrativeqa", "single_document_qa", "qa_f1", 128),
        Task("qasper", "single_document_qa", "qa_f1", 128, in_e=True),
        Task("multifieldqa_en", "single_document_qa", "qa_f1", 64, in_e=True),
        Task("multifieldqa_zh", "single_document_qa", "qa_f1_zh", 64, "zh"),
        Task("hotpotqa", "multi_document_qa", "qa_f1", 32, in_e=True),
        Task("2wikimqa", "multi_document_qa", "qa_f1", 32, in_e=True),
        Task("musique", "multi_document_qa", "qa_f1", 32),
        Task("dureader", "multi_document_qa", "rouge_l_zh", 128, "zh"),
        Task("gov_report", "summarization", "rouge_l", 512, in_e=True),
        Task("qmsum", "summarization", "rouge_l", 512),
        Task("multi_news", "summarization", "rouge_l", 512, in_e=True),
        Task("vcsum", "summarization", "rouge_l_zh", 512, "zh"),
        Task("trec", "few_shot", "classification", 64, in_e=True, **_EXAMPLES),
        Task("triviaqa", "few_shot", "qa_f1", 32, in_e=True, **_EXAMPLES),
        Task("samsum", "few_shot", "rouge_l", 128, in_e=True, **_EXAMPLES),
        Task("lsht", "few_shot", "classification", 64, "zh", **_EXAMPLES),
        Task("passage_count", "synthetic", "count", 32, in_e=True),
        Task("passage_retrieval_en", "synthetic", "retrieval", 32, in_e=True),
        Task("passage_retrieval_zh", "synthetic", "retrieval_zh", 32, "zh"),
        Task("lcc", "code", "code_similarity", 64, **_CODE),
        Task("repobench-p", "code", "code_similarity", 64, **_CODE),
    )
}
V2 = Task("longbench-v2", "multiple_choice", "multiple_choice", 128)
GROUPS = tuple(dict.fromkeys(task.group for task in TASKS.values()))


@dataclass(frozen=True)
class Row:
    """One question, whatever layout it was read from.

    Attributes:
        task: of the row.
        number: its place among the rows of the task, from 0.
        fields: values of a template's placeholders: `context`, `input`, and `A` to `D` for v2.
        ready: a ready-formatted prompt, up to the question and the rest; None if the row needs a template.
        answers: all right ones.
        classes: of a classification; otherwise empty.
        labels: to break scores down by: the length band (E), or difficulty and length (v2).
        max_new_tokens: the row's own; None for the task's.
    """

    task: Task
    number: int
    fields: Mapping[str, str]
    ready: tuple[str, str] | None
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    labels: tuple[str, ...]
    max_new_tokens: int | None


def resolve_tasks(names: Sequence[str], version: Version) -> list[Task]:
    """Resolve names to tasks; a group or a language (`en`, `zh`) stands for all of its tasks, no names for all.

    Raises:
        ValueError: a name that is none of these, or names for v2, which has but one task.
    """
    if version == "v2":
        if names:
            raise ValueError(f"tasks={list(names)}: allowed none, as version v2 has only one task")
        return [V2]
    known = [task for task in TASKS.values() if version == "v1" or task.in_e]
    for name in names:
        if not any(name in (task.name, task.group, task.language) for task in known):
            allowed = [*(task.name for task in known), *GROUPS, "en", "zh"]
            raise ValueError(f"tasks={list(names)}: no {name!r} in version {version}; allowed {', '.join(allowed)}")
    return [task for task in known if not names or {task.name, task.group, task.language} & set(names)]


def load_rows(data: str | None, version: Version, names: Sequence[str] = ()) -> list[Row]:
    """Load the rows of tasks, in the benchmark's order of tasks.

    Args:
        data: a folder with `TASK.jsonl` (`TASK_e.jsonl` for E, `data.json` for v2), one such file, or a dataset of the
            hub, in the original layout or ready formatted; the benchmark's own dataset when None.
        version: of the benchmark.
        names: see `resolve_tasks`; a local `data` must have the tasks named one by one, and of other tasks
            gives those that it has.

    Raises:
        ValueError: no such task; a file that is missing, empty or malformed; rows without a column that is needed.
        OSError: the hub cannot be reached, or has no such dataset.
    """
    tasks = resolve_tasks(names, version)
    source = HUB[version] if data is None else data
    path = Path(source)
    if isfile(path):
        rows_by_task = _of_file(path, tasks)
    elif isdir(path):
        rows_by_task = _of_folder(path, tasks, version)
    elif source.count("/") == 1 and not path.suffix.startswith(".json"):
        rows_by_task = {task: hub_rows(source, _file_stem(task, version)) for task in tasks}
    else:
        raise ValueError(f"data={quoted(source)}: no such file or folder, and no OWNER/NAME of a dataset on the hub")
    if missing := [task.name for task in tasks if task.name in names and task not in rows_by_task]:
        raise ValueError(
            f"data={source!r}: no rows of {', '.join(missing)}; it has {', '.join(t.name for t in rows_by_task)}"
        )
    return [
        _parse(raw, task, number, version, f"data={source!r}, {task.name}, row {number}")
        for task, rows in rows_by_task.items()
        for number, raw in enumerate(rows)
    ]


def length_band(length: int) -> str:
    """LongBench-E's band of a length in words (characters for Chinese)."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def _file_stem(task: Task, version: Version) -> str:
    return "data" if version == "v2" else f"{task.name}_e" if version == "e" else task.name


def _of_folder(folder: Path, tasks: list[Task], version: Version) -> dict[Task, list[dict[str, Any]]]:
    rows_by_task: dict[Task, list[dict[str, Any]]] = {}
    for task in tasks:
        stem = _file_stem(task, version)
        for path in (folder / f"{stem}.jsonl", folder / f"{stem}.json"):
            if path.is_file():
                rows_by_task[task] = _read(path)
                break
    if not rows_by_task:
        stems = ", ".join(f"{_file_stem(task, version)}.jsonl" for task in tasks)
        raise ValueError(f"data={str(folder)!r}: none of the files {stems}")
    return rows_by_task


def _of_file(path: Path, tasks: list[Task]) -> dict[Task, list[dict[str, Any]]]:
    """Rows of one file, which may hold several tasks if its rows name theirs."""
    if tasks == [V2]:
        return {V2: _read(path)}
    rows: dict[str, list[dict[str, Any]]] = {}
    for raw in _read(path):
        name = str(raw.get("dataset") or raw.get("task") or path.stem)
        rows.setdefault(name.removesuffix("_e").removesuffix("-e"), []).append(raw)
    rows_by_task = {task: rows[task.name] for task in tasks if task.name in rows}
    if not rows_by_task:
        wanted = ", ".join(task.name for task in tasks)
        raise ValueError(f"data={str(path)!r}: its rows belong to {', '.join(rows)}, and to none of {wanted}")
    return rows_by_task


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix != ".json":
        return read_jsonl(path, ())
    rows = parse_json(read_text(path), str(path))
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{path}: allowed is a list of JSON objects, at least one")
    return rows


def hub_rows(name: str, stem: str) -> list[dict[str, Any]]:
    """The rows of a configuration of a dataset on the hub."""
    try:
        return _fetch(name, stem)
    except OSError as error:
        raise OSError(
            f"data={name!r}: neither a file or folder here, nor could it be fetched from the hub; download it where "
            f"there is one, and give its folder ({error})"
        ) from error
    except ValueError as error:
        raise ValueError(f"data={name!r}: no {stem} that could be read: {error}") from error


def _fetch(name: str, stem: str) -> list[dict[str, Any]]:
    from huggingface_hub import hf_hub_download

    datasets = require("datasets", "data sets on the hub", "datasets")
    check_hub(name)
    configuration: str | None = stem
    if stem == "data":  # v2 has one, or if ready formatted two: with and without a chain of thought
        configuration = "0shot" if "0shot" in datasets.get_dataset_config_names(name) else None
    try:
        return list(next(iter(datasets.load_dataset(name, configuration).values())))
    except RuntimeError as error:
        if "script" not in str(error):
            raise
    # The original dataset is a script, which `datasets` 4 and later refuse to run, beside an archive of files.
    with zipfile.ZipFile(hf_hub_download(name, "data.zip", repo_type="dataset")) as archive:
        member = f"data/{stem}.jsonl"
        if member not in archive.namelist():
            raise ValueError(f"no {member} in its data.zip")
        with tempfile.TemporaryDirectory() as folder:
            return read_jsonl(Path(archive.extract(member, folder)), ())


def _parse(raw: Mapping[str, Any], task: Task, number: int, version: Version, where: str) -> Row:
    """Parse a row of either layout: ready formatted if it has an `answer_prefix`, else original."""
    formatted = "answer_prefix" in raw
    answer = "answer" if version == "v2" else "answers"
    needed = ["context", answer, *(["question", "answer_prefix"] if formatted else [])]
    if version == "v2":
        needed += ["difficulty", "length"]
        needed += [] if formatted else ["question", *(f"choice_{letter}" for letter in "ABCD")]
    else:
        needed += ["length"] if version == "e" else []
        needed += ["all_classes"] if task.metric == "classification" else []
        needed += [] if formatted else ["input"]
    check_columns(dict(raw), needed, where)
    answers = [raw[answer]] if isinstance(raw[answer], str) else raw[answer]
    if not (isinstance(answers, list) and answers and all(isinstance(text, str) for text in answers)):
        raise ValueError(f"{where}: {answer}={answers!r}: allowed is a text or a list of texts, at least one")
    if version == "v2":
        fields = {letter: str(raw.get(f"choice_{letter}", "")).strip() for letter in "ABCD"}
        fields |= {"context": str(raw["context"]).strip(), "input": str(raw["question"]).strip()}
        labels = [str(raw["difficulty"]), str(raw["length"])]
    else:
        fields = {"context": str(raw["context"]), "input": str(raw.get("input", ""))}
        labels = [length_band(int(raw["length"]))] if version == "e" else []
    return Row(
        task=task,
        number=number,
        fields=fields,
        ready=(str(raw["context"]), f"{raw['question']}{raw['answer_prefix']}") if formatted else None,
        answers=tuple(answers),
        classes=tuple(raw.get("all_classes") or ()),
        labels=tuple(labels),
        max_new_tokens=int(raw["max_new_tokens"]) if "max_new_tokens" in raw else None,
    )
