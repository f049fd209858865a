"""RULER's files: tasks and generation lengths by file name, questions split off, answers scored by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.small_model import small_model
from support.models.toy_tokenizers import Characters, GivenRun
from transformers import LlamaForCausalLM

from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.ruler import Ruler, split_question, string_match_all, string_match_part

ROW = {"index": 0, "input": "Ann is 7.\nBob is 8.\nHow old is Bob? Bob is", "outputs": ["8"], "length": 16}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(vocab_size=128)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(sample: Sample) -> tuple[str, str]:
    return Characters().decode(sample.prompt[0]), Characters().decode(sample.question[0])


def test_question_is_the_last_line(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write(tmp_path / "niah_single_1.jsonl", ROW)
    (sample,) = Ruler(data=path).samples(model, Characters())
    assert texts(sample) == ("Ann is 7.\nBob is 8.\n", "How old is Bob? Bob is")
    assert sample.id == "niah_single_1/1"
    assert "answer_ids" not in sample.data
    (sample,) = Ruler(data=path, cached_question=False).samples(model, Characters())
    assert texts(sample) == (ROW["input"], "")


def test_answer_prefix_follows_the_input(model: LlamaForCausalLM, tmp_path: Path) -> None:
    row = {**ROW, "input": "Bob is 8.\nHow old is Bob?", "answer_prefix": " Bob is"}
    path = write(tmp_path / "niah_single_1.jsonl", row)
    (sample,) = Ruler(data=path, scoring="forced").samples(model, Characters())
    assert texts(sample) == ("Bob is 8.\n", "How old is Bob? Bob is")
    assert Characters().decode(sample.data["answer_ids"]) == " 8"
    (sample,) = Ruler(data=path, chat_template=True).samples(model, Characters())
    assert texts(sample) == ("<user>Bob is 8.\n", "How old is Bob?<assistant>Bob is")


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("a\nQuestion: b\nc", "Question: b\nc"),
        ("What is a\nb\nWhat are c? d\ne", "What are c? d\ne"),
        ("a\nb\n", "b\n"),
    ],
)
def test_question_of_an_input(text: str, question: str) -> None:
    assert split_question(text) == (text.removesuffix(question), question)


@pytest.mark.parametrize(("name", "new_tokens"), [("niah_multikey_3-4096.jsonl", 128), ("cwe/validation.jsonl", 120)])
def test_generation_length_of_each_task(model: LlamaForCausalLM, tmp_path: Path, name: str, new_tokens: int) -> None:
    path = write(tmp_path / name, ROW)
    (sample,) = Ruler(data=path).samples(model, Characters())
    run = GivenRun(text="8")
    Ruler(data=path).score(run, sample, Characters())
    assert run.most == new_tokens
    (sample,) = Ruler(data=path, max_new_tokens=7).samples(model, Characters())
    assert sample.data["max_new_tokens"] == 7


def test_names_that_tell_no_task(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write(tmp_path / "aqua.jsonl", ROW)
    with pytest.raises(ValueError, match=r"data='.*aqua\.jsonl'"):
        Ruler(data=path).samples(model, Characters())
    (sample,) = Ruler(data=path, task="qa").samples(model, Characters())
    assert (sample.data["task"], sample.data["max_new_tokens"]) == ("aqua", 32)


def test_folder_takes_its_files_in_turns(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write(tmp_path / "4096" / "vt.jsonl", ROW, ROW, ROW)
    write(tmp_path / "8192" / "vt.jsonl", ROW)
    write(tmp_path / "8192" / "qa_1" / "validation.jsonl", ROW, ROW)
    ids = [sample.id for sample in Ruler(data=tmp_path).samples(model, Characters())]
    assert ids == [
        "4096/vt/1", "8192/qa_1/validation/1", "8192/vt/1", "4096/vt/2", "8192/qa_1/validation/2", "4096/vt/3",
    ]  # fmt: skip
    assert len(Ruler(data=tmp_path, limit=1).samples(model, Characters())) == 3
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"data='.*none'"):
        Ruler(data=tmp_path / "none").samples(model, Characters())


def test_matches_by_hand() -> None:
    assert string_match_all("It was RED, then blue.", ["red", "Blue", "green", "re"]) == 0.75
    assert string_match_part("It was RED.", ["green", "red"]) == 1
    assert string_match_part("It was.", ["green", "red"]) == 0


@pytest.mark.parametrize(("kind", "score"), [("vt", 0.5), ("qa", 1.0)])
def test_questions_take_any_reference(kind: str, score: float) -> None:
    data = {"task": "t", "kind": kind, "length": 9, "references": ["X1", "Y2"], "max_new_tokens": 5}
    sample = Sample("1", torch.zeros(1, 4, dtype=torch.long), data)
    record = Ruler(data=Path("t")).score(GivenRun(text="only x1"), sample, Characters())
    assert record == {"task": "t", "length": 9, "score": score, "text": "only x1"}


def test_summary_is_a_mean_over_tasks() -> None:
    records = [{"task": task, "score": score} for task, score in (("vt", 1.0), ("vt", 0.5), ("qa_1", 0.0))]
    expected = {"accuracy": 0.375, "accuracy.qa_1": 0.0, "accuracy.vt": 0.75}
    written, forced = Ruler(data=Path("t")), Ruler(data=Path("t"), scoring="forced")
    assert written.summarize(records) == pytest.approx(expected)
    assert (written.main_score, forced.main_score) == ("accuracy", "logprob")
    assert forced.summarize([{"task": "vt", "score": 1.0, "logprob": -0.5}]) == {
        "accuracy": 1.0,
        "accuracy.vt": 1.0,
        "logprob": -0.5,
        "logprob.vt": -0.5,
    }


@pytest.mark.parametrize(
    ("row", "scoring", "message"),
    [
        ({**ROW, "outputs": []}, "generate", r"row 1: outputs=\[\]"),
        ({**ROW, "outputs": ["7", "8"]}, "forced", "row 1: outputs="),
        ({**ROW, "input": "word " * 820}, "generate", "row 1: 4229 tokens"),
    ],
)
def test_bad_rows(model: LlamaForCausalLM, tmp_path: Path, row: dict[str, Any], scoring: str, message: str) -> None:
    path = write(tmp_path / "niah_single_1.jsonl", row)
    with pytest.raises(ValueError, match=message):
        Ruler(data=path, scoring=scoring).samples(model, Characters())
