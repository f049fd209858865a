"""LongBench's rows from files and from an imitated hub, its prompts, and its metrics by hand."""

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.models.fake_hub import FakeHub
from support.models.toy_tokenizers import Characters

from kvcache_compress.eval.tasks.longbench.data import TASKS, load_rows, resolve_tasks
from kvcache_compress.eval.tasks.longbench.prompts import encode_prompt, fill, read_templates
from kvcache_compress.eval.tasks.longbench.scores import METRICS, best_score, first_line

ORIGINAL = {
    "input": "Which colour?", "context": "The {house} is red.", "answers": ["red", "dark red"], "length": 4000,
    "dataset": "qasper", "language": "en", "all_classes": None, "_id": "0a",
}  # fmt: skip


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_tasks() -> None:
    assert len(resolve_tasks((), "v1")) == 21
    assert len(resolve_tasks((), "e")) == 13
    assert [task.name for task in resolve_tasks(("code", "trec"), "v1")] == ["trec", "lcc", "repobench-p"]
    assert len(resolve_tasks(("zh",), "v1")) == 5
    plain = [task.name for task in TASKS.values() if not task.chat]
    assert plain == ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]
    with pytest.raises(ValueError, match=r"'musique' in version e must be one of qasper"):
        resolve_tasks(("musique",), "e")


def test_original_layout(tmp_path: Path) -> None:
    write(tmp_path / "qasper.jsonl", ORIGINAL, {**ORIGINAL, "input": "Why?"})
    write(tmp_path / "trec.jsonl", {**ORIGINAL, "all_classes": ["red", "blue"]})
    rows = load_rows(tmp_path, "v1")
    assert [(row.task.name, row.number) for row in rows] == [("qasper", 0), ("qasper", 1), ("trec", 0)]
    assert (rows[0].context, rows[0].input) == ("The {house} is red.", "Which colour?")
    assert (rows[0].answers, rows[0].classes, rows[0].band) == (("red", "dark red"), (), None)
    assert rows[2].classes == ("red", "blue")
    assert [row.task.name for row in load_rows(tmp_path, "v1", ["few_shot"])] == ["trec"]


def test_bands_of_longbench_e(tmp_path: Path) -> None:
    rows = [{**ORIGINAL, "length": length} for length in (3999, 4000, 7999, 8000)]
    write(tmp_path / "qasper_e.jsonl", *rows)
    bands = [row.band for row in load_rows(tmp_path, "e", ["qasper"])]
    assert bands == ["0-4k", "4-8k", "4-8k", "8k+"]


def test_one_file(tmp_path: Path) -> None:
    """Its name tells the task, unless a single one is asked for."""
    path = write(tmp_path / "qasper.jsonl", ORIGINAL)
    assert [row.task.name for row in load_rows(path, "v1")] == ["qasper"]
    other = write(tmp_path / "some rows.jsonl", ORIGINAL)
    assert [row.task.name for row in load_rows(other, "v1", ["qasper"])] == ["qasper"]
    with pytest.raises(ValueError, match=r"no file .*qasper\.jsonl"):
        load_rows(other, "v1")


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "qasper.jsonl"
    with pytest.raises(ValueError, match="no such file or folder"):
        load_rows(file, "v1")
    with pytest.raises(ValueError, match=r"no file qasper\.jsonl"):
        load_rows(tmp_path, "v1", ["qasper"])
    write(file, ORIGINAL)
    with pytest.raises(ValueError, match=r"no file musique\.jsonl"):
        load_rows(tmp_path, "v1", ["qasper", "musique"])
    write(file, {**ORIGINAL, "answers": []})
    with pytest.raises(ValueError, match=r"row 0: answers=\[\] must be a text or a list of texts"):
        load_rows(file, "v1")


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "qasper_e.jsonl", {"context": "a", "answers": ["b"], "_id": 0})
    with pytest.raises(ValueError, match="row 0: no column input, length; it has context, answers, _id"):
        load_rows(path, "e")


def test_the_dataset_of_the_hub_is_read_from_its_archive(tmp_path: Path, hub: FakeHub) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("qasper_e", "trec_e"):
            archive.writestr(f"data/{name}.jsonl", json.dumps({**ORIGINAL, "all_classes": ["red"]}) + "\n\n")
    hub.folder = tmp_path
    rows = load_rows(None, "e", ["qasper", "trec"])
    assert [(row.task.name, row.number, row.answers) for row in rows] == [
        ("qasper", 0, ("red", "dark red")), ("trec", 0, ("red", "dark red")),
    ]  # fmt: skip


def test_hub_out_of_reach(hub: FakeHub) -> None:
    hub.error = ConnectionError("no network")
    with pytest.raises(OSError, match=r"zai-org/LongBench cannot be read: .*\(no network\)\. Download it elsewhere"):
        load_rows(None, "v1", ["qasper"])


def test_templates() -> None:
    template = "Read: {context}\nAsk: {input}"
    assert fill(template, "a {input} {0} b", "why {context}?") == ("Read: a {input} {0} b", "\nAsk: why {context}?")


def test_our_own_prompts_cover_all_tasks() -> None:
    templates = read_templates(None, list(TASKS.values()))
    silent = {task.name for task in TASKS.values() if "{input}" not in templates[task]}
    assert silent == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"qasper": "{context}: {input}"}))
    qasper = TASKS["qasper"]
    assert read_templates(path, [qasper]) == {qasper: "{context}: {input}"}
    with pytest.raises(ValueError, match="no template for trec"):
        read_templates(path, [qasper, TASKS["trec"]])
    for text in ("{context} {question}", "no place", "{context} {context}"):
        path.write_text(json.dumps({"qasper": text}))
        with pytest.raises(ValueError, match=r"qasper: needs \{context\} once, and no other"):
            read_templates(path, [qasper])
    path.write_text("[1]")
    with pytest.raises(ValueError, match="must be a mapping of task names to templates"):
        read_templates(path, [qasper])


def test_prompts_lose_their_middle() -> None:
    """A token per letter, and one at the start; the chat template has six before the message and eleven after it."""

    def encode(limit: int | None, *, chat: bool = False, split: bool = False) -> tuple[str, str, int]:
        *ids, cut = encode_prompt(Characters(), "abcdef", "xyz", chat=chat, limit=limit, split=split)  # type: ignore[arg-type]
        prompt, question = ("".join(map(chr, part)) for part in ids)
        return prompt, question, cut

    assert encode(10) == ("\1abcdefxyz", "", 0)
    assert encode(9) == ("\1abcdfxyz", "", 1)
    assert encode(6) == ("\1abyz", "", 5)
    assert encode(9, split=True) == ("\1abcdf", "xyz", 1)
    assert encode(5, split=True) == ("\1ab", "yz", 5)
    assert encode(None, chat=True) == ("<user>abcdefxyz<assistant>", "", 0)
    assert encode(23, chat=True, split=True) == ("<user>abc", "xyz<assistant>", 3)
    with pytest.raises(ValueError, match="max_prompt_tokens=18: must be at least 19"):
        encode(18, chat=True)
    with pytest.raises(ValueError, match="chat_template='on': this tokenizer has no chat template"):
        encode_prompt(Characters(chat=False), "a", "b", chat=True, limit=None, split=False)  # type: ignore[arg-type]


CLASSES = ["City", "Country", "Other location", "location", "Food"]
WORDS = [f"w{index}" for index in range(1200)]


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        ("qa_f1", "The red house!", "a RED house", 1.0),  # case, articles and punctuation do not count
        ("qa_f1", "the old red brick house", "red house", 2 * 2 / (4 + 2)),
        ("qa_f1", "red red", "red", 2 * 1 / (2 + 1)),  # each word as often as it is there
        ("qa_f1", "theater", "the ater", 0.0),
        ("qa_f1", "", "red", 0.0),
        # jieba cuts 我 / 来到 / 北京 / 清华大学 and 他 / 来到 / 清华大学.
        ("qa_f1_zh", "我来到北京清华大学。", "他来到清华大学", 2 * 2 / (4 + 3)),
        ("qa_f1_zh", "“ 清华大学”，！", "清华大学", 1.0),
        ("qa_f1_zh", "。", "清华大学", 0.0),
        # The benchmark's list of punctuation lacks this bracket, which therefore is a word.
        ("qa_f1_zh", "《清华大学", "清华大学", 2 / 3),
        ("rouge_l", "d c b a", "a b c d", 1 / 4),  # order counts within a sentence
        ("rouge_l", "c d. a b", "a b. c d", 1.0),  # but not of sentences
        ("rouge_l", "a a a b", "a b", 1.0),  # distinct words
        ("rouge_l", "A b", "a b", 1 / 2),
        # The union over sentences: a b of the first, c of the second; of 4 and 5 distinct words.
        ("rouge_l", "a b x. c", "a b c y z", 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)),
        ("rouge_l", "", "a", 0.0),
        ("rouge_l", "...", "a", 0.0),
        ("rouge_l", "a. ", "a", 2 * (1 / 2) * 1 / (3 / 2)),  # what is left behind the full stop is an empty word
        ("rouge_l", " ".join(WORDS), " ".join(WORDS[600:]), 2 * 0.5 / 1.5),
        ("rouge_l_zh", "我来到北京清华大学", "他来到清华大学", 2 * 2 / (4 + 3)),
        ("classification", "City or Country", "City", 0.5),
        ("classification", "Food", "City", 0.0),
        ("classification", "Other location", "Other location", 1.0),  # `location` is part of the right name
        ("classification", "Other location", "location", 0.5),
        ("count", "7", "7", 1.0),
        ("count", "7 or 8, no, 7 of 17", "7", 0.5),
        ("count", "seven", "7", 0.0),
        ("retrieval", "Paragraph 12", "Paragraph 12", 1.0),
        ("retrieval", "1 and 12", "Paragraph 12", 0.5),
        ("retrieval", "段落3", "段落3", 1.0),
        ("retrieval", "段落33", "段落3", 0.0),
        ("code_similarity", "\n\nreturn x\nmore", "return x", 1.0),
        ("code_similarity", "```python\n# a comment\n// another\nreturn x\n```", "return x", 1.0),
        ("code_similarity", "abcd", "abcx", 0.75),  # of 8 characters, 6 are common
        ("code_similarity", "ab", "abcd", 0.67),  # whole per cent
        ("code_similarity", "# only a comment", "x", 0.0),
    ],
)
def test_scores(metric: str, prediction: str, answer: str, expected: float) -> None:
    classes = [CLASSES] if metric == "classification" else []
    assert METRICS[metric](prediction, answer, *classes) == pytest.approx(expected)


def test_the_best_of_all_answers_counts() -> None:
    assert best_score("qa_f1", "red", ["blue", "red", "red house"]) == 1.0
    assert first_line("\n\nfirst\nsecond") == "first"
    with pytest.raises(ValueError, match="answer='twelve': must contain Paragraph N"):
        METRICS["retrieval"]("12", "twelve")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ImportError, match=r'pip install "kvcache-compress\[eval\]"'):
        METRICS["qa_f1_zh"]("a", "a")
