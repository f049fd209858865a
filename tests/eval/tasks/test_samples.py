"""Helpers that benchmarks share: files, tokenized prompts, and the score of a known answer."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.toy_tokenizers import START, Characters, GivenRun, Words, word_tokenizer

from kvcache_compress.eval.tasks.samples import as_chat, check_fits, force_answer, generate_text, read_jsonl, split_ids


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "b": "x\\u2028y"}\n\n{"a": 2, "b": null}\n', encoding="utf-8")
    assert read_jsonl(path, ["a", "b"]) == [{"a": 1, "b": "x\u2028y"}, {"a": 2, "b": None}]
    path.write_text('{"a": "x\u2028y"}\n', encoding="utf-8")  # a line separator to Python, not to JSON
    assert read_jsonl(path, ["a"]) == [{"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\n", "line 1: list instead of a JSON object"),
        ('{"a": 1}\n\n{"c": 1, "d": 2}\n', "line 3: no column a; it has c, d"),
        ("\n\n", "rows.jsonl: no rows"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_jsonl(path, ["a"])


def test_parts_are_cut_from_one_tokenization() -> None:
    tokenizer = Words()
    parts = split_ids(tokenizer, ["one two\n", "three", " four"])
    assert [tokenizer.decode(ids) for ids in parts] == ["one two", "\nthree", " four"]
    assert [*parts[0], *parts[1], *parts[2]] == tokenizer("one two\nthree four")["input_ids"]
    assert split_ids(tokenizer, ["one", " two"], special=False) == [[1], [2]]
    assert split_ids(Characters(), ["", "ab"]) == [[START], [97, 98]]


def test_chat_is_split_before_the_question() -> None:
    before, after = as_chat(Characters(), "What? It rained. ", "What? ", "It")
    assert before == "<user>What? It rained. "
    assert after == "What? <assistant>It"
    with pytest.raises(ValueError, match="chat_template=True: this tokenizer has no chat template"):
        as_chat(Characters(chat=False), "", "", "")


def test_chat_switches_thinking_off() -> None:
    tokenizer = word_tokenizer(["a"], unk_token="a")
    message = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
    ending = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    tokenizer.chat_template = message + ending
    before, after = as_chat(tokenizer, "It rained. ", "What?", "It")
    assert before == "<user>It rained. "
    assert after == "What?<assistant>" + "<think></think>It"


def test_forced_answer_by_hand() -> None:
    logits = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]]).log()
    run = GivenRun(logits=logits + 2)
    answer = force_answer(run, [2, 1])
    assert run.fed == [2]  # nothing follows the last token
    assert answer.logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.2)])
    assert answer.greedy.tolist() == [True, False]
    assert answer.logprob == pytest.approx((math.log(0.5) + math.log(0.2)) / 2)
    assert answer.exact == 0
    assert force_answer(run, [2, 0]).exact == 1


def test_generated_text_ends_where_the_model_ends() -> None:
    run = GivenRun(text="yes\x01")
    assert generate_text(run, Characters(), 7) == "yes"
    assert (run.most, run.ends) == (7, [])
    run.prefill.model.generation_config = SimpleNamespace(eos_token_id=[4, 5])
    generate_text(run, Characters(), 7)
    assert run.ends == [4, 5]


def test_too_long_for_the_model() -> None:
    config = SimpleNamespace(max_position_embeddings=8)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    check_fits(model, 8, "row 1")
    with pytest.raises(ValueError, match="row 1: 9 tokens with the answer, but the model has only 8"):
        check_fits(model, 9, "row 1")
