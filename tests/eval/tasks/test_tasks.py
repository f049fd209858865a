"""What benchmarks of tasks share (files, tokenized prompts, known answers), needles in a haystack, and RULER."""

import json
import math
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.small_model import method_config, small_model
from support.models.toy_tokenizers import START, Characters, GivenRun, Words, word_tokenizer
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.haystack import haystack_words, hide, plain_sentences, words_of
from kvcache_compress.eval.tasks.needle import INTRODUCTION, WORDINGS, Needle, passkey_found, word_recall
from kvcache_compress.eval.tasks.ruler import Ruler, split_question, string_match_all, string_match_part
from kvcache_compress.eval.tasks.samples import as_chat, force_answer, generate_text, read_jsonl, split_ids, too_long

TEXT = words_of("One two. Three four five. Six.")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(vocab_size=128)


def text_of(sample: Sample, tokenizer: Characters) -> str:
    return tokenizer.decode(sample.prompt[0]) + tokenizer.decode(sample.question[0])


def test_own_sentences_tell_nothing_and_never_repeat() -> None:
    sentences = list(islice(plain_sentences(7), 3000))
    assert len(set(sentences)) == 3000
    assert sentences == list(islice(plain_sentences(7), 3000))
    assert sentences[:5] != list(islice(plain_sentences(8), 5))
    assert all(re.fullmatch(r"[A-Z][^.!?0-9]*\.", sentence) for sentence in sentences)
    told = set(re.findall(r"\w+", " ".join(sentences).lower()))
    assert WORDINGS["needle"].answer is not None
    assert not told & {"key", "signal", "anchor", *WORDINGS["needle"].answer.split()}


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, "N. One two. Three four five. Six."),
        (0.3, "One two. N. Three four five. Six."),
        (0.6, "One two. Three four five. N. Six."),
        (1, "One two. Three four five. Six. N."),
    ],
)
def test_needle_stands_between_sentences(depth: float, expected: str) -> None:
    assert hide("N.", TEXT, depth) == expected
    assert hide("N.", TEXT[:4], 1) == "One two. Three four. N.", "a sentence that is cut short is closed"


def test_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("C d.\n")
    (tmp_path / "a.txt").write_text("A b.")
    (tmp_path / "note.md").write_text("No.")
    seen = {"".join(haystack_words(tmp_path, 6, seed)) for seed in range(20)}
    assert seen == {"\nA b.\nC d.\nA b.", "\nC d.\nA b.\nC d."}  # from a sentence that the seed chooses, and round
    with pytest.raises(ValueError, match="nowhere': no such folder"):
        haystack_words(tmp_path / "nowhere", 6, 0)


@pytest.mark.parametrize(("mode", "chat_template"), [("needle", False), ("passkey", True)])
def test_prompts_have_the_wanted_length(model: LlamaForCausalLM, mode: str, chat_template: bool) -> None:
    tokenizer = Words()
    benchmark = Needle(mode=mode, lengths=[80, 301], depths=[0, 0.5, 1], chat_template=chat_template)
    samples = benchmark.samples(model, tokenizer)
    assert [(s.data["length"], s.data["depth"]) for s in samples] == [(n, d) for n in (80, 301) for d in (0, 0.5, 1)]
    assert len({sample.id for sample in samples}) == 6
    for sample in samples:
        assert sample.prompt.shape[1] + sample.question.shape[1] == sample.data["length"]
        assert text_of(sample, tokenizer).count(sample.data["answer"]) == 1


def test_needle_is_at_the_wanted_depth(model: LlamaForCausalLM) -> None:
    tokenizer = Words()
    for sample in Needle(lengths=[600], depths=[0, 0.2, 0.5, 1], cached_question=False).samples(model, tokenizer):
        assert sample.question.shape == (1, 0)
        text = text_of(sample, tokenizer)
        hay, _, question = text.removeprefix(INTRODUCTION).partition("\n\n")
        assert question == "What is the signal for the ship at anchor? The signal for the ship at anchor is"
        before, _, after = hay.partition("The signal for the ship at anchor is one green lantern over two white flags.")
        assert len(before) / len(before + after) == pytest.approx(sample.data["depth"], abs=0.02)
        assert before.rstrip().endswith(".") or not before


def test_places_share_a_haystack_but_not_a_pass_key(model: LlamaForCausalLM) -> None:
    tokenizer = Words()
    benchmark = Needle(mode="passkey", lengths=[200], depths=[0, 1], repeats=2, seed=3)
    samples = benchmark.samples(model, tokenizer)
    keys = [sample.data["answer"] for sample in samples]
    assert len(set(keys)) == 4
    assert all(re.fullmatch(r"[1-9]\d{4}", key) for key in keys)
    texts = [text_of(s, tokenizer).replace(f"The pass key is number {s.data['answer']}. ", "")[:600] for s in samples]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    again = benchmark.samples(model, tokenizer)
    assert [sample.digest for sample in again] == [sample.digest for sample in samples]


def test_question_and_answer_follow_the_context(model: LlamaForCausalLM) -> None:
    tokenizer = Characters()
    (sample,) = Needle(mode="passkey", lengths=[400], depths=[0.5]).samples(model, tokenizer)
    asked = "What is the pass key? The pass key is number"
    assert tokenizer.decode(sample.question[0]) == asked
    assert tokenizer.decode(sample.prompt[0]).endswith(".\n\n")
    assert tokenizer.decode(sample.data["answer_ids"]) == f" {sample.data['answer']}"
    (sample,) = Needle(mode="passkey", lengths=[400], depths=[0.5], scoring="generate").samples(model, tokenizer)
    assert "answer_ids" not in sample.data


def test_scores_by_hand() -> None:
    assert word_recall("one green lantern over two", "Two lanterns: a GREEN lantern.") == 3 / 5
    assert word_recall("one green lantern", "") == 0
    assert [passkey_found("12345", text) for text in ("it is 12345.", "it is 123456", "1 2 3 4 5")] == [1, 0, 0]


def test_score_takes_one_of_two_ways() -> None:
    data: dict[str, Any] = {"length": 64, "depth": 0.5, "answer": "12345", "answer_ids": [1, 0]}
    sample = Sample("64", torch.zeros(1, 4, dtype=torch.long), data)
    place = {"length": 64, "depth": 0.5}
    logits = torch.tensor([[0.2, 0.8], [0.4, 0.6], [0.5, 0.5]]).log()
    forced = Needle(mode="passkey").score(GivenRun(logits=logits), sample, Characters())
    assert forced == {**place, "score": 0, "logprob": pytest.approx(math.log(0.8 * 0.4) / 2)}
    run = GivenRun(text="12345!")
    written = Needle(mode="passkey", scoring="generate", max_new_tokens=9).score(run, sample, Characters())
    assert written == {**place, "score": 1, "text": "12345!"}
    assert run.most == 9


def test_a_length_beyond_the_positions_is_skipped_and_named(model: LlamaForCausalLM) -> None:
    benchmark = Needle(mode="passkey", lengths=[300, 5000, 350], depths=[1])
    assert [sample.data["length"] for sample in benchmark.samples(model, Characters())] == [300, 350]
    (reason,) = benchmark.skipped(model)
    assert reason.startswith("lengths=5000: 5032 tokens")
    caches = [full_cache(), preset_cache(method_config("turboquant"), name="packed")]
    full, packed = Runner(model, Characters()).run("needle", benchmark, caches)
    assert (full.error, full.skipped, full.samples) == (None, [reason], 2)
    assert full.scores["logprob"] != packed.scores["logprob"]
    assert set(packed.scores) == {f"{score}{of}" for score in ("recall", "logprob") for of in ("", ".300", ".350")}
    with pytest.raises(ValueError, match="lengths=20: "):
        Needle(lengths=[20]).samples(model, Words())
    with pytest.raises(ValueError, match=r"lengths=5000: 5032 .*; lengths=6000: 6032 "):
        Needle(lengths=[5000, 6000]).samples(model, Characters())


ROW = {"index": 0, "input": "Ann is 7.\nBob is 8.\nHow old is Bob? Bob is", "outputs": ["8"], "length": 16}


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
        "accuracy": 1.0, "accuracy.vt": 1.0, "logprob": -0.5, "logprob.vt": -0.5,
    }  # fmt: skip


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
    logprobs, exact = force_answer(run, [2, 1])
    assert run.fed == [2]  # nothing follows the last token
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.2)])
    assert not exact
    assert force_answer(run, [2, 0])[1]


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
    assert too_long(model, 8, "row 1") is None
    assert too_long(model, 9, "row 1") == "row 1: 9 tokens with the answer, but the model has only 8 positions"
