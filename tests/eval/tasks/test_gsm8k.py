"""GSM8K: solved examples as the common prompt, numbers found in solutions, and hand-computed likelihoods."""

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.fake_hub import FakeHub
from support.models.small_model import method_config, small_model
from support.models.toy_tokenizers import Characters, GivenRun
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.benchmark import Sample
from kvcache_compress.eval.tasks.gsm8k import INTRODUCTION, Gsm8k, extract_number

ROWS = [
    {
        "question": f"Ann has {n} pears and eats one. How many?",
        "answer": f"{n}-1=<<{n}-1={n - 1}>>{n - 1}\n#### {n - 1}",
    }
    for n in range(2, 7)
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model(vocab_size=128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def decoded(ids: Any) -> str:
    return Characters().decode(ids)


def test_examples_are_the_prompt_and_are_not_asked(model: LlamaForCausalLM, file: Path) -> None:
    samples = Gsm8k(data=file, shots=2).samples(model, Characters())
    assert [sample.id for sample in samples] == ["3", "4", "5"]
    assert {decoded(sample.prompt[0]) for sample in samples} == {
        f"{INTRODUCTION}"
        "Question: Ann has 2 pears and eats one. How many?\nAnswer: 2-1=1\n#### 1\n\n"
        "Question: Ann has 3 pears and eats one. How many?\nAnswer: 3-1=2\n#### 2\n\n"
    }
    assert decoded(samples[0].question[0]) == "Question: Ann has 4 pears and eats one. How many?\nAnswer:"
    assert samples[0].data == {"result": "3"}
    assert [s.id for s in Gsm8k(data=file, shots=0, limit=2).samples(model, Characters())] == ["1", "2"]


def test_reference_solution_follows_the_question(model: LlamaForCausalLM, file: Path) -> None:
    (sample, *_) = Gsm8k(data=file, shots=2, scoring="likelihood").samples(model, Characters())
    assert decoded(sample.data["chain_ids"]) == " 4-1=3\n####"
    assert decoded(sample.data["number_ids"]) == " 3"
    (whole, *_) = Gsm8k(data=file, shots=2, scoring="likelihood", cached_question=False).samples(model, Characters())
    assert whole.question.shape == (1, 0)
    assert torch.equal(whole.prompt, torch.cat([sample.prompt, sample.question], dim=1))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3+4=7\n#### 7", "7"),
        ("#### $1,200.00 in all, of 5", "1200"),
        ("#### none, so 12.", "12"),
        ("it is 2-5=-3", "-3"),
        ("it is 7-3", "3"),
        ("costs -$4", "-4"),
        (".5", "0.5"),
        ("no idea", None),
    ],
)
def test_number_of_a_solution(text: str, number: str | None) -> None:
    assert extract_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(("text", "score"), [(" that is 4\n\nQuestion: #### 5", 1), ("#### 14", 0), ("Question: 4", 0)])
def test_generated_number(text: str, score: float) -> None:
    sample = Sample("1", torch.zeros(1, 4, dtype=torch.long), {"result": "4"})
    run = GivenRun(text=text)
    record = Gsm8k(max_new_tokens=50).score(run, sample, Characters())
    assert record["score"] == score
    assert record["text"] == text.split("Question:")[0]
    assert run.config is not None
    assert run.config.max_new_tokens == 50


def test_likelihood_by_hand() -> None:
    sample = Sample("1", torch.zeros(1, 4, dtype=torch.long), {"result": "4", "chain_ids": [0], "number_ids": [1, 1]})
    logits = torch.tensor([[0.3, 0.7], [0.4, 0.6], [0.2, 0.8], [0.5, 0.5]]).log()
    run = GivenRun(logits=logits)
    assert Gsm8k(scoring="likelihood").score(run, sample, Characters()) == {
        "answer_logprob": pytest.approx(math.log(0.3 * 0.6 * 0.8) / 3),
        "number_logprob": pytest.approx(math.log(0.6 * 0.8) / 2),
        "number_exact": 1,
    }
    assert run.fed == [0, 1]  # nothing follows the last token


def test_hub(model: LlamaForCausalLM, hub: FakeHub) -> None:
    hub.dataset = lambda *_, split: ROWS if split == "train" else ROWS[::-1]
    samples = Gsm8k(shots=1).samples(model, Characters())
    assert hub.asked == [(("openai/gsm8k", "main"), {"split": split}) for split in ("train", "test")]
    assert len(samples) == 5
    assert "Ann has 2 pears" in decoded(samples[0].prompt[0])
    assert "Ann has 6 pears" in decoded(samples[0].question[0])
    assert [sample.id for sample in Gsm8k(shots=1, split="train").samples(model, Characters())] == ["2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("content", "options", "named"),
    [
        (None, {"shots": 5}, "shots=5: "),
        (None, {"shots": 4, "max_new_tokens": 4000}, "row 5, after 4 examples: "),
        ('{"question": "How many?"}', {"shots": 0}, "line 1: no column answer"),
        ('{"question": "How many?", "answer": "4"}', {"shots": 0}, "row 1: no #### .*answer='4'"),
    ],
)
def test_bad_files(
    model: LlamaForCausalLM, file: Path, content: str | None, options: dict[str, Any], named: str
) -> None:
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=named):
        Gsm8k(data=file, **options).samples(model, Characters())


def test_caches_are_measured(model: LlamaForCausalLM, file: Path) -> None:
    specs = [full_cache(), preset_cache(method_config("turboquant"), name="packed")]
    benchmark = Gsm8k(data=file, shots=3, scoring="likelihood")
    full, packed = Runner(model, Characters()).run("gsm8k", benchmark, specs)
    assert full.error is packed.error is None
    assert packed.packed_tokens["least"] > 100
    assert packed.score != full.score
    whole = benchmark.model_copy(update={"cached_question": False})
    (again,) = Runner(model, Characters()).run("gsm8k", whole, specs[:1])
    assert again.score == pytest.approx(full.score, rel=1e-4)
