"""LongBench's tasks, and their rows from files or from the hub.

LongBench (Bai et al., 2023, arXiv:2308.14508) has 21 tasks. LongBench-E has 13 of them, with lengths spread evenly.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Literal

from kvcache_compress.eval.tasks.samples import check_columns, read_jsonl
from kvcache_compress.files.text import read_yaml
from kvcache_compress.modeling.hub import check_hub
from kvcache_compress.validation import quoted

Version = Literal["v1", "e"]

HUB = "zai-org/LongBench"
"""The benchmark's own dataset on the hub."""


@dataclass(frozen=True)
class Task:
    """One task, as the benchmark defines it.

    Attributes:
        name: the benchmark's name for it.
        group: one of the six groups in the benchmark's tables.
        metric: a key of `scores.METRICS`.
        max_new_tokens: tokens to generate.
        language: `en` or `zh`.
        chat: True if the prompt goes into the model's chat template; otherwise the model continues plain text.
        first_line: True if only the first line of the prediction counts, because models go on with more examples.
        in_e: True if the task is in LongBench-E too.
    """

    name: str
    group: str
    metric: str
    max_new_tokens: int
    language: str = "en"
    chat: bool = True
    first_line: bool = False
    in_e: bool = False


TASKS: dict[str, Task] = {
    name: Task(name, **fields) for name, fields in read_yaml(Path(__file__).with_name("tasks.yaml")).items()
}
GROUPS = tuple(dict.fromkeys(task.group for task in TASKS.values()))


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        task: its task.
        number: its index among the task's rows.
        context: the long text.
        input: the question, or what else follows the text.
        answers: all right answers.
        classes: names of all classes if the task is a classification; otherwise empty.
        band: the length band of LongBench-E; None in v1.
    """

    task: Task
    number: int
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    band: str | None


def resolve_tasks(names: Sequence[str], version: Version) -> list[Task]:
    """Resolve names to tasks. A group or a language (`en`, `zh`) stands for all of its tasks; no names, for all tasks.

    Raises:
        ValueError: A name is none of these.
    """
    known = [task for task in TASKS.values() if version == "v1" or task.in_e]
    for name in names:
        if not any(name in (task.name, task.group, task.language) for task in known):
            names_of_all = [*(task.name for task in known), *GROUPS, "en", "zh"]
            raise ValueError(f"tasks: {quoted(name)} in version {version} must be one of {', '.join(names_of_all)}")
    return [task for task in known if not names or {task.name, task.group, task.language} & set(names)]


def load_rows(data: Path | None, version: Version, names: Sequence[str] = ()) -> list[Row]:
    """Load the rows of tasks, in the benchmark's order of tasks.

    Args:
        data: a folder with `TASK.jsonl` (`TASK_e.jsonl` for E), or one such file; by default the benchmark's dataset on
            the hub.
        version: the version of the benchmark.
        names: see `resolve_tasks`. A folder must have the tasks that are named one by one; of groups it may lack some.

    Raises:
        ValueError: There is no such task; a file is missing, empty or malformed; or rows lack a column.
        OSError: The hub cannot be reached.
    """
    tasks = resolve_tasks(names, version)
    stems = {task: f"{task.name}_e" if version == "e" else task.name for task in tasks}
    source = str(data or HUB)
    if data is None:
        rows_by_task = {task: hub_rows(stem) for task, stem in stems.items()}
    elif isfile(data):
        rows_by_task = {
            task: read_jsonl(data, ()) for task, stem in stems.items() if len(tasks) == 1 or stem == data.stem
        }
    elif isdir(data):
        files = {task: data / f"{stem}.jsonl" for task, stem in stems.items()}
        rows_by_task = {task: read_jsonl(file, ()) for task, file in files.items() if file.is_file()}
    else:
        raise ValueError(f"data={quoted(source)}: no such file or folder")
    missing = [task for task in tasks if task not in rows_by_task and (task.name in names or not rows_by_task)]
    if missing:
        raise ValueError(f"data={quoted(source)}: no file {', '.join(f'{stems[task]}.jsonl' for task in missing)}")
    return [
        _parse(raw, task, number, version, f"data={source!r}, {task.name}, row {number}")
        for task, rows in rows_by_task.items()
        for number, raw in enumerate(rows)
    ]


def hub_rows(stem: str) -> list[dict[str, Any]]:
    """Read the rows of one file of the benchmark's dataset, which is an archive on the hub.

    Raises:
        OSError: The hub cannot be reached, or its archive is damaged.
    """
    from huggingface_hub import constants, hf_hub_download

    try:
        if not constants.HF_HUB_OFFLINE:
            check_hub(HUB, "dataset")
        with zipfile.ZipFile(hf_hub_download(HUB, "data.zip", repo_type="dataset")) as archive:
            lines = archive.read(f"data/{stem}.jsonl").decode("utf-8").split("\n")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise OSError(f"{HUB} cannot be read: {error}. Download it elsewhere and give its folder as data") from error
    return [json.loads(line) for line in lines if line.strip()]


def _parse(raw: dict[str, Any], task: Task, number: int, version: Version, where: str) -> Row:
    needed = ["context", "answers", "input", *(["length"] if version == "e" else [])]
    check_columns(raw, [*needed, *(["all_classes"] if task.metric == "classification" else [])], where)
    answers = [raw["answers"]] if isinstance(raw["answers"], str) else raw["answers"]
    if not (isinstance(answers, list) and answers and all(isinstance(text, str) for text in answers)):
        raise ValueError(f"{where}: answers={quoted(answers)} must be a text or a list of texts, with at least one")
    length = int(raw["length"]) if version == "e" else None
    band = None if length is None else "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
    classes = tuple(raw.get("all_classes") or ())
    return Row(task, number, str(raw["context"]), str(raw["input"]), tuple(answers), classes, band)
