"""LongBench's rows from files and from an imitated hub, and its prompts."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.models.fake_hub import FakeHub
from support.paths import DATA

from kvcache_compress.eval.tasks.longbench.data import TASKS, V2, load_rows, resolve_tasks
from kvcache_compress.eval.tasks.longbench.prompts import Template, encode_prompt, read_templates

PUBLISHED = DATA / "longbench"

ORIGINAL = {
    "input": "Which colour?",
    "context": "The {house} is red.",
    "answers": ["red", "dark red"],
    "length": 4000,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "0a",
}
READY = {
    "context": "Text: a house.\n",
    "question": "Which colour? ",
    "answer_prefix": "Colour:",
    "answers": ["red"],
    "all_classes": None,
    "length": 7999,
    "max_new_tokens": 84,
    "task": "qasper",
}
CHOICE = {
    "context": " A house. ",
    "question": "Which colour?",
    **{f"choice_{letter}": f"colour {letter}" for letter in "ABCD"},
    "answer": "C",
    "difficulty": "hard",
    "length": "short",
}


def write(path: Path, *rows: Mapping[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_tasks() -> None:
    assert len(resolve_tasks((), "v1")) == 21
    assert len(resolve_tasks((), "e")) == 13
    assert resolve_tasks((), "v2") == [V2]
    assert [task.name for task in resolve_tasks(("code", "trec"), "v1")] == ["trec", "lcc", "repobench-p"]
    assert len(resolve_tasks(("zh",), "v1")) == 5
    plain = [task.name for task in TASKS.values() if not task.chat]
    assert plain == ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]
    with pytest.raises(ValueError, match=r"no 'musique' in version e; allowed qasper"):
        resolve_tasks(("musique",), "e")
    with pytest.raises(ValueError, match="allowed none, as version v2 has only one task"):
        resolve_tasks(("qasper",), "v2")


def test_original_layout(tmp_path: Path) -> None:
    write(tmp_path / "qasper.jsonl", ORIGINAL, {**ORIGINAL, "input": "Why?"})
    write(tmp_path / "trec.jsonl", {**ORIGINAL, "all_classes": ["red", "blue"]})
    rows = load_rows(str(tmp_path), "v1")
    assert [(row.task.name, row.number) for row in rows] == [("qasper", 0), ("qasper", 1), ("trec", 0)]
    assert rows[0].fields == {"context": "The {house} is red.", "input": "Which colour?"}
    assert (rows[0].answers, rows[0].classes, rows[0].labels) == (("red", "dark red"), (), ())
    assert (rows[0].ready, rows[0].max_new_tokens, rows[2].classes) == (None, None, ("red", "blue"))
    assert [row.task.name for row in load_rows(str(tmp_path), "v1", ["few_shot"])] == ["trec"]


def test_bands_of_longbench_e(tmp_path: Path) -> None:
    rows = [{**ORIGINAL, "length": length} for length in (3999, 4000, 7999, 8000)]
    write(tmp_path / "qasper_e.jsonl", *rows)
    bands = [row.labels for row in load_rows(str(tmp_path), "e", ["qasper"])]
    assert bands == [("0-4k",), ("4-8k",), ("4-8k",), ("8k+",)]


def test_ready_formatted_layout(tmp_path: Path) -> None:
    (row,) = load_rows(write(tmp_path / "any name.jsonl", READY), "v1")
    assert row.task.name == "qasper"
    assert row.ready == ("Text: a house.\n", "Which colour? Colour:")
    assert row.max_new_tokens == 84


def test_one_file_with_several_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", {**READY, "task": "triviaqa_e"}, {**READY, "task": "lcc-e"}, READY)
    rows = load_rows(path, "e")
    assert [(row.task.name, row.labels) for row in rows] == [
        ("qasper", ("4-8k",)),
        ("triviaqa", ("4-8k",)),
        ("lcc", ("4-8k",)),
    ]
    with pytest.raises(ValueError, match="its rows belong to triviaqa, lcc, qasper, and to none of trec"):
        load_rows(path, "e", ["trec"])
    with pytest.raises(ValueError, match="no rows of trec; it has lcc"):
        load_rows(path, "e", ["trec", "lcc"])


@pytest.mark.parametrize("ready", [False, True])
def test_multiple_choice(tmp_path: Path, ready: bool) -> None:
    raw = {**CHOICE, "answer_prefix": "Say:"} if ready else CHOICE
    (tmp_path / "data.json").write_text(json.dumps([raw]))
    (row,) = load_rows(str(tmp_path), "v2")
    assert (row.task, row.answers, row.labels) == (V2, ("C",), ("hard", "short"))
    assert row.fields["context"] == "A house."
    assert row.fields["D"] == "colour D"
    assert row.ready == ((" A house. ", "Which colour?Say:") if ready else None)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        load_rows(str(tmp_path / "qasper.jsonl"), "v1")
    with pytest.raises(ValueError, match=r"none of the files qasper\.jsonl"):
        load_rows(str(tmp_path), "v1", ["qasper"])
    write(tmp_path / "qasper.jsonl", ORIGINAL)
    with pytest.raises(ValueError, match="no rows of musique; it has qasper"):
        load_rows(str(tmp_path), "v1", ["qasper", "musique"])
    (tmp_path / "qasper.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"qasper.jsonl: no rows"):
        load_rows(str(tmp_path), "v1")
    (tmp_path / "qasper.jsonl").write_text(json.dumps(ORIGINAL) + "\n{broken\n")
    with pytest.raises(ValueError, match=r"qasper.jsonl, line 2: not JSON"):
        load_rows(str(tmp_path), "v1")
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data.json: allowed is a list of JSON objects"):
        load_rows(str(tmp_path), "v2")


@pytest.mark.parametrize(
    ("raw", "version", "missing"),
    [
        ({key: text for key, text in ORIGINAL.items() if key != "input"}, "v1", "input"),
        ({key: text for key, text in ORIGINAL.items() if key != "length"}, "e", "length"),
        ({key: text for key, text in READY.items() if key != "question"}, "v1", "question"),
        (CHOICE, "v1", "answers, input"),
        (ORIGINAL, "v2", "answer, difficulty, question, choice_A, choice_B, choice_C, choice_D"),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, raw: dict[str, Any], version: Any, missing: str) -> None:
    path = write(tmp_path / "qasper.jsonl", raw)
    with pytest.raises(ValueError, match=f"row 0: no column {missing}; it has"):
        load_rows(path, version)


def test_answers_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "qasper.jsonl", {**ORIGINAL, "answers": []})
    with pytest.raises(ValueError, match=r"row 0: answers=\[\]: allowed is a text or a list of texts"):
        load_rows(path, "v1")


def test_ready_formatted_dataset_of_the_hub(hub: FakeHub) -> None:
    hub.dataset = {"test": datasets.Dataset.from_list([READY, READY])}
    rows = load_rows("someone/LongBench", "e", ["qasper", "lcc"])
    assert hub.asked == [(("someone/LongBench", name), {}) for name in ("qasper_e", "lcc_e")]
    assert [(row.task.name, row.number) for row in rows] == [("qasper", 0), ("qasper", 1), ("lcc", 0), ("lcc", 1)]

    hub.asked.clear()
    hub.dataset, hub.configurations = {"train": [CHOICE]}, ["0shot", "cot"]
    assert len(load_rows("someone/LongBench-v2", "v2")) == 1
    hub.configurations = ["default"]
    assert len(load_rows("someone/LongBench-v2", "v2")) == 1
    assert [arguments[1] for arguments, _ in hub.asked] == ["0shot", None]


def test_original_dataset_of_the_hub_is_read_from_its_archive(tmp_path: Path, hub: FakeHub) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(ORIGINAL))
    hub.dataset = RuntimeError("Dataset scripts are no longer supported, but found LongBench.py")
    hub.folder = tmp_path
    (row,) = load_rows(None, "v1", ["qasper"])
    assert row.answers == ("red", "dark red")
    with pytest.raises(ValueError, match=r"no musique that could be read: no data/musique.jsonl in its data.zip"):
        load_rows(None, "v1", ["musique"])


def test_hub_out_of_reach(hub: FakeHub) -> None:
    hub.dataset = ConnectionError("no network")
    with pytest.raises(OSError, match=r"nor could it be fetched from the hub; download it .* \(no network\)"):
        load_rows("someone/LongBench", "v1", ["qasper"])


def test_templates() -> None:
    template = Template.parse("Read: {context}\nAsk: {input}", ["context", "input"], "here")
    fields = {"context": "a {input} {0} b", "input": "why {context}?"}
    assert template.fill(fields) == ("Read: a {input} {0} b", "\nAsk: why {context}?")
    published = Template.parse("$DOC$ $Q$ (A) $C_A$", ["context", "input", *"ABCD"], "here")
    assert published.fill({"context": "x", "input": "y", "A": "z"}) == ("x", " y (A) z")
    with pytest.raises(ValueError, match=r"here: placeholder \{question\}: allowed \{context\}, \{input\}"):
        Template.parse("{context} {question}", ["context", "input"], "here")
    for text in ("no place", "{context} {context}"):
        with pytest.raises(ValueError, match=r"placeholders \{context\}: allowed exactly one"):
            Template.parse(text, ["context", "input"], "here")


def test_our_own_prompts_cover_all_tasks() -> None:
    templates = read_templates(None, [*TASKS.values(), V2])
    silent = {task.name for task in TASKS.values() if "{input}" not in templates[task].after}
    assert silent == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    assert all(f"{{{letter}}}" in templates[V2].after for letter in "ABCD")


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"qasper": "{context}: {input}"}))
    qasper = TASKS["qasper"]
    assert read_templates(path, [qasper]) == {qasper: Template("{context}", ": {input}")}
    with pytest.raises(ValueError, match="no template for trec"):
        read_templates(path, [qasper, TASKS["trec"]])
    (tmp_path / "0shot.txt").write_text("$DOC$\n$Q$")
    assert read_templates(tmp_path / "0shot.txt", [V2])[V2].after == "\n{input}"
    with pytest.raises(ValueError, match="no such file"):
        read_templates(tmp_path / "none.json", [qasper])
    path.write_text("[")
    with pytest.raises(ValueError, match="not JSON: "):
        read_templates(path, [qasper])
    path.write_text("[1]")
    with pytest.raises(ValueError, match="allowed is a template, that is a text, by the name of each task"):
        read_templates(path, [qasper])


class Letters:
    """A token per letter, and a start token of -1."""

    def __init__(self, template: bool = False) -> None:
        self.chat_template = "some" if template else None

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*([-1] if add_special_tokens else []), *map(ord, text)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<{messages[0]['content']}>!"


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_prompts_lose_their_middle() -> None:
    def encode(limit: int | None, *, chat: bool = False, split: bool = False) -> tuple[list[int], list[int], int]:
        encoded = encode_prompt(Letters(chat), "abcdef", "xyz", chat=chat, limit=limit, split=split)  # type: ignore[arg-type]
        return encoded.prompt, encoded.question, encoded.cut

    assert encode(None) == ([-1, *ids("abcdefxyz")], [], 0)
    assert encode(10) == ([-1, *ids("abcdefxyz")], [], 0)
    assert encode(9) == ([-1, *ids("abcdfxyz")], [], 1)
    assert encode(6) == ([-1, *ids("abyz")], [], 5)
    assert encode(None, split=True) == ([-1, *ids("abcdef")], ids("xyz"), 0)
    assert encode(9, split=True) == ([-1, *ids("abcdf")], ids("xyz"), 1)
    assert encode(5, split=True) == ([-1, *ids("ab")], ids("yz"), 5)
    assert encode(None, chat=True) == (ids("<abcdefxyz>!"), [], 0)
    assert encode(9, chat=True, split=True) == (ids("<abc"), ids("xyz>!"), 3)
    with pytest.raises(ValueError, match="max_prompt_tokens=4: allowed at least 5"):
        encode(4, chat=True)
    with pytest.raises(ValueError, match="chat_template='on': this tokenizer has none"):
        encode_prompt(Letters(), "a", "b", chat=True, limit=None, split=False)  # type: ignore[arg-type]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the benchmark's own files are not here")
def test_published_files() -> None:
    lengths = json.loads((PUBLISHED / "config" / "dataset2maxlen.json").read_text())
    assert {task.name: task.max_new_tokens for task in TASKS.values()} == lengths
    templates = read_templates(PUBLISHED / "config" / "dataset2prompt.json", list(TASKS.values()))
    assert len(templates) == 21
    own = read_templates(None, list(TASKS.values()))
    assert not set(own.values()) & set(templates.values())
    rows = load_rows(str(PUBLISHED), "v1")
    counts = {task.name: sum(row.task == task for row in rows) for task in TASKS.values()}
    assert {name: n for name, n in counts.items() if n} == {
        "multifieldqa_zh": 20,
        "multi_news": 60,
        "passage_retrieval_zh": 20,
    }
