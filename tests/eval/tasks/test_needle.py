"""Needle in a haystack: prompts of the wanted length, the needle at the wanted depth, and hand-computed scores."""

import math
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.small_model import method_config, small_model
from support.models.toy_tokenizers import Characters, GivenRun, Words
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.haystack import haystack_words, hide, plain_sentences, words_of
from kvcache_compress.eval.tasks.needle import INTRODUCTION, WORDINGS, Needle, passkey_found, word_recall

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


def test_own_wording(model: LlamaForCausalLM) -> None:
    tokenizer = Words()
    own = {"needle": "Ann likes {answer} (really).", "question": "What does Ann like?", "answer": "old {trains}"}
    (sample,) = Needle(lengths=[100], depths=[0.5], **own).samples(model, tokenizer)
    assert "Ann likes old {trains} (really). " in text_of(sample, tokenizer)
    assert tokenizer.decode(sample.question[0]) == "\n\nWhat does Ann like?"
    (sample,) = Needle(lengths=[100], depths=[0.5], answer_prefix="She likes", **own).samples(model, tokenizer)
    assert tokenizer.decode(sample.question[0]) == "\n\nWhat does Ann like? She likes"


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
