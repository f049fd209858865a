"""LongBench's rows from files and from an imitated hub, and its prompts."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.models.fake_hub import FakeHub

from kvcache_compress.eval.tasks.longbench.data import TASKS, V2, load_rows, resolve_tasks
from kvcache_compress.eval.tasks.longbench.prompts import Template, encode_prompt, read_templates

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
    with pytest.raises(ValueError, match=r"'musique' in version e must be one of qasper"):
        resolve_tasks(("musique",), "e")
    with pytest.raises(ValueError, match="has no effect with version v2"):
        resolve_tasks(("qasper",), "v2")


def test_original_layout(tmp_path: Path) -> None:
    write(tmp_path / "qasper.jsonl", ORIGINAL, {**ORIGINAL, "input": "Why?"})
    write(tmp_path / "trec.jsonl", {**ORIGINAL, "all_classes": ["red", "blue"]})
    rows = load_rows(str(tmp_path), "v1")
    assert [(row.task.name, row.number) for row in rows] == [("qasper", 0), ("qasper", 1), ("trec", 0)]
    assert rows[0].fields == {"context": "The {house} is red.", "input": "Which colour?"}
    assert (rows[0].answers, rows[0].classes, rows[0].labels) == (("red", "dark red"), (), ())
    assert rows[2].classes == ("red", "blue")
    assert [row.task.name for row in load_rows(str(tmp_path), "v1", ["few_shot"])] == ["trec"]


def test_bands_of_longbench_e(tmp_path: Path) -> None:
    rows = [{**ORIGINAL, "length": length} for length in (3999, 4000, 7999, 8000)]
    write(tmp_path / "qasper_e.jsonl", *rows)
    bands = [row.labels for row in load_rows(str(tmp_path), "e", ["qasper"])]
    assert bands == [("0-4k",), ("4-8k",), ("4-8k",), ("8k+",)]


def test_one_file(tmp_path: Path) -> None:
    """Its name tells the task, unless a single one is asked for."""
    path = write(tmp_path / "qasper.jsonl", ORIGINAL)
    assert [row.task.name for row in load_rows(path, "v1")] == ["qasper"]
    other = write(tmp_path / "some rows.jsonl", ORIGINAL)
    assert [row.task.name for row in load_rows(other, "v1", ["qasper"])] == ["qasper"]
    with pytest.raises(ValueError, match=r"no file .*qasper\.jsonl"):
        load_rows(other, "v1")


def test_multiple_choice(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([CHOICE]))
    (row,) = load_rows(str(tmp_path), "v2")
    assert (row.task, row.answers, row.labels) == (V2, ("C",), ("hard", "short"))
    assert (row.fields["context"], row.fields["D"]) == ("A house.", "colour D")


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "qasper.jsonl"
    with pytest.raises(ValueError, match="no such file or folder"):
        load_rows(str(file), "v1")
    with pytest.raises(ValueError, match=r"no file qasper\.jsonl"):
        load_rows(str(tmp_path), "v1", ["qasper"])
    write(file, ORIGINAL)
    with pytest.raises(ValueError, match=r"no file musique\.jsonl"):
        load_rows(str(tmp_path), "v1", ["qasper", "musique"])
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data.json: must be a list of JSON objects"):
        load_rows(str(tmp_path), "v2")
    write(file, {**ORIGINAL, "answers": []})
    with pytest.raises(ValueError, match=r"row 0: answers=\[\] must be a text or a list of texts"):
        load_rows(str(file), "v1")


@pytest.mark.parametrize(
    ("raw", "version", "missing"),
    [
        ({key: text for key, text in ORIGINAL.items() if key != "length"}, "e", "length"),
        (CHOICE, "v1", "answers, input"),
        (ORIGINAL, "v2", "answer, difficulty, question, choice_A, choice_B, choice_C, choice_D"),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, raw: dict[str, Any], version: Any, missing: str) -> None:
    path = write(tmp_path / ("qasper_e.jsonl" if version == "e" else "qasper.jsonl"), raw)
    with pytest.raises(ValueError, match=f"row 0: no column {missing}; it has"):
        load_rows(path, version)


def test_dataset_of_the_hub(hub: FakeHub) -> None:
    hub.dataset = {"test": datasets.Dataset.from_list([{**ORIGINAL, "all_classes": ["red"]}] * 2)}
    rows = load_rows("someone/LongBench", "e", ["qasper", "trec"])
    assert hub.asked == [(("someone/LongBench", name), {}) for name in ("qasper_e", "trec_e")]
    assert [(row.task.name, row.number) for row in rows] == [("qasper", 0), ("qasper", 1), ("trec", 0), ("trec", 1)]


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
    with pytest.raises(OSError, match=r"the hub cannot be reached.* \(no network\)"):
        load_rows("someone/LongBench", "v1", ["qasper"])


def test_templates() -> None:
    template = Template.parse("Read: {context}\nAsk: {input}", ["context", "input"], "here")
    fields = {"context": "a {input} {0} b", "input": "why {context}?"}
    assert template.fill(fields) == ("Read: a {input} {0} b", "\nAsk: why {context}?")
    published = Template.parse("$DOC$ $Q$ (A) $C_A$", ["context", "input", *"ABCD"], "here")
    assert published.fill({"context": "x", "input": "y", "A": "z"}) == ("x", " y (A) z")
    with pytest.raises(ValueError, match=r"here: placeholder \{question\} must be one of \{context\}, \{input\}"):
        Template.parse("{context} {question}", ["context", "input"], "here")
    for text in ("no place", "{context} {context}"):
        with pytest.raises(ValueError, match=r"needs exactly one placeholder \{context\}"):
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
    path.write_text("[1]")
    with pytest.raises(ValueError, match="must be a mapping of task names to templates"):
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

    assert encode(10) == ([-1, *ids("abcdefxyz")], [], 0)
    assert encode(9) == ([-1, *ids("abcdfxyz")], [], 1)
    assert encode(6) == ([-1, *ids("abyz")], [], 5)
    assert encode(9, split=True) == ([-1, *ids("abcdf")], ids("xyz"), 1)
    assert encode(5, split=True) == ([-1, *ids("ab")], ids("yz"), 5)
    assert encode(None, chat=True) == (ids("<abcdefxyz>!"), [], 0)
    assert encode(9, chat=True, split=True) == (ids("<abc"), ids("xyz>!"), 3)
    with pytest.raises(ValueError, match="max_prompt_tokens=4: must be at least 5"):
        encode(4, chat=True)
    with pytest.raises(ValueError, match="chat_template='on': this tokenizer has no chat template"):
        encode_prompt(Letters(), "a", "b", chat=True, limit=None, split=False)  # type: ignore[arg-type]
