"""LongBench with a tiny model: samples, generation, summaries, command."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.small_model import method_config
from transformers import LlamaForCausalLM

from kvcache_compress.eval.caches.caches import full_cache, preset_cache
from kvcache_compress.eval.runner.runner import Runner
from kvcache_compress.eval.tasks.longbench.benchmark import LongBench
from kvcache_compress.eval.tasks.longbench.scores import best_score


class Letters:
    """64 tokens, one per letter; no start token and no chat template."""

    eos_token_id = None
    pad_token_id = 0

    def __init__(self, newline: int = 0) -> None:
        letters = list("\n " + string.ascii_letters + string.digits)
        letters[0], letters[newline] = letters[newline], letters[0]
        self.letters = letters
        self.ids = {letter: index for index, letter in enumerate(letters)}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.ids.get(letter, ord(letter) % 64) for letter in text]}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join(self.letters[index] for index in ids.tolist())


CONTEXT = "aabbcc" * 20
OPTIONS: dict[str, Any] = {"max_new_tokens": 12}


def write(folder: Path, tasks: dict[str, list[str]]) -> dict[str, Any]:
    """Files with the contexts of tasks, and prompts that add `ab` and `ba`; as options of the benchmark."""
    for task, contexts in tasks.items():
        rows = ({"context": text, "input": "ab", "answers": ["aXb", "c"], "length": 100} for text in contexts)
        lines = "".join(json.dumps(row | {"all_classes": ["a", "c"]}) + "\n" for row in rows)
        for name in (task, f"{task}_e"):
            (folder / f"{name}.jsonl").write_text(lines)
    prompts = folder / "dataset2prompt.json"
    prompts.write_text(json.dumps(dict.fromkeys(tasks, "{context}{input}ba")))
    return {"data": str(folder), "prompts": prompts, "tasks": tuple(tasks), **OPTIONS}


def test_samples_take_the_limit_of_each_task(model: LlamaForCausalLM, tmp_path: Path) -> None:
    given = write(tmp_path, {"trec": [CONTEXT] * 3, "qasper": [CONTEXT] * 2})
    samples = LongBench(**given, limit=2).samples(model, Letters())
    assert [sample.id for sample in samples] == ["qasper/0", "qasper/1", "trec/0", "trec/1"]
    assert samples[0].prompt.shape == (1, 124)
    assert samples[0].question.shape == (1, 0)
    assert samples[0].data == {
        "task": "qasper", "answers": ["aXb", "c"], "classes": ["a", "c"], "labels": [], "max_new_tokens": 12, "cut": 0,
        "answer_ids": Letters()(" aXb")["input_ids"],
    }  # fmt: skip
    asked = LongBench(**given, limit=1, cached_question=True).samples(model, Letters())[1]
    assert asked.question.tolist() == [Letters()("abba")["input_ids"]]
    assert torch.equal(torch.cat([asked.prompt, asked.question], dim=1), samples[0].prompt)


def test_prompts_fit_the_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    given = write(tmp_path, {"qasper": ["ab" * 3000]})
    (sample,) = LongBench(**given).samples(model, Letters())
    assert sample.prompt.shape == (1, 4096 - 12)
    assert sample.data["cut"] == 6004 - 4084
    (sample,) = LongBench(**given | {"max_new_tokens": 96, "max_prompt_tokens": 100}).samples(model, Letters())
    assert sample.prompt.tolist() == [Letters()("ab" * 48 + "abba")["input_ids"]]
    with pytest.raises(ValueError, match="max_prompt_tokens=4090"):
        LongBench(**given, max_prompt_tokens=4090).samples(model, Letters())


def test_our_own_template(model: LlamaForCausalLM, tmp_path: Path) -> None:
    given = write(tmp_path, {"lcc": [CONTEXT]})
    (published,) = LongBench(**given).samples(model, Letters())
    (own,) = LongBench(**given | {"prompts": None}).samples(model, Letters())
    assert own.digest != published.digest
    with pytest.raises(ValueError, match="chat_template='on'"):
        LongBench(**given, chat_template="on").samples(model, Letters())


@torch.inference_mode()
def test_cells(model: LlamaForCausalLM, tmp_path: Path) -> None:
    given = write(tmp_path, {task: ["ab" * 60, "acd" * 40] for task in ("qasper", "trec")})
    packed = preset_cache(method_config("turboquant"), name="packed")
    benchmark = LongBench(**given, version="e")
    full, other = Runner(model, Letters(), None).run("longbench", benchmark, [full_cache(), packed])
    assert (full.error, other.error, other.packed_tokens["least"] > 0) == (None, None, True)
    tokenizer = Letters()
    for sample, record in zip(benchmark.samples(model, tokenizer), full.records, strict=True):
        ids = model.generate(sample.prompt, max_new_tokens=12, do_sample=False)[0, sample.prompt.shape[1] :]
        assert record["prediction"] == tokenizer.decode(ids, skip_special_tokens=True)
        counted = record["prediction"].lstrip("\n").split("\n")[0] if record["task"] == "trec" else record["prediction"]
        metric = {"trec": "classification", "qasper": "qa_f1"}[record["task"]]
        assert record["score"] == best_score(metric, counted, ["aXb", "c"], ["a", "c"])
        assert (record["labels"], record["cut"]) == (["0-4k"], 0)
        answer = torch.tensor([sample.data["answer_ids"]])
        log_p = model(torch.cat([sample.prompt, answer], 1)).logits[0, -answer.shape[1] - 1 : -1].log_softmax(-1)
        assert record["logprob"] == pytest.approx(log_p.gather(-1, answer.T).mean().item(), abs=1e-4)
    assert full.scores == benchmark.summarize(full.records)
    assert full.score == full.scores["average"]


@torch.inference_mode()
def test_samsum_ends_with_its_line(model: LlamaForCausalLM, tmp_path: Path) -> None:
    given = write(tmp_path, {"samsum": [CONTEXT], "multi_news": [CONTEXT]})
    benchmark = LongBench(**given | {"max_new_tokens": 40})
    prompt = benchmark.samples(model, Letters())[0].prompt
    newline = model(prompt).logits[0, -1].argmax().item()
    tokenizer = Letters(newline)
    assert tokenizer.letters[newline] == "\n"
    assert not {0, newline} & set(prompt[0].tolist()), "the tokens of the prompt are as before"
    (cell,) = Runner(model, tokenizer, None).run("longbench", benchmark, [full_cache()])
    news, samsum = (record["prediction"] for record in cell.records)
    assert news.startswith("\n")
    assert len(news) == 40
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=newline, min_new_tokens=1)
    assert samsum == tokenizer.decode(expected[0, prompt.shape[1] :], skip_special_tokens=True)
    assert not samsum.startswith("\n")


def record(task: str, score: float, *labels: str) -> dict[str, Any]:
    return {"task": task, "score": score, "logprob": -score, "labels": list(labels)}


def test_summaries_by_hand() -> None:
    records = [record("qasper", 0.5), record("qasper", 0.1), record("trec", 1.0), record("narrativeqa", 0.0)]
    assert LongBench().summarize(records) == pytest.approx(
        {
            "average": (30 + 100 + 0) / 3, "single_document_qa": 15, "few_shot": 100, "group_average": 57.5,
            "single_document_qa.qasper": 30, "single_document_qa.narrativeqa": 0, "few_shot.trec": 100,
            "logprob": -(0.3 + 1 + 0) / 3, "logprob.qasper": -0.3, "logprob.trec": -1, "logprob.narrativeqa": 0,
        }
    )  # fmt: skip
    records = [record("trec", 1.0, "0-4k"), record("lcc", 0.5, "0-4k"), record("lcc", 0.3, "8k+")]
    scores = LongBench(version="e").summarize(records)
    assert scores["average"] == pytest.approx(70)
    assert (scores["average.0-4k"], scores["average.8k+"]) == pytest.approx((75, 30))
    assert (scores["code.lcc"], scores["code.lcc.0-4k"], scores["code.lcc.8k+"]) == pytest.approx((40, 50, 30))
