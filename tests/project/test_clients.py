"""Clients that only call `generate`, inside `compress`: pipelines, streaming, lm-eval."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config, mixed_config, small_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from kvcache_compress import CompressedCache, compress, enable_fused_attention

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}<assistant>"
GREEDY = {"max_new_tokens": 16, "do_sample": False}
CONFIG = method_config("turboquant")
WORDS = [f"w{index}" for index in range(VOCAB - 6)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per word, which pads on the left."""
    torch.set_num_threads(1)
    names = ["<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>", *WORDS]
    words = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", chat_template=TEMPLATE, **special)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_model()


def text(tokens: int, seed: int = 0) -> str:
    picked = torch.randint(len(WORDS), (tokens,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in picked)


def expected(model: LlamaForCausalLM, tokenizer: Any, texts: list[str], config: Any = CONFIG, **how: Any) -> list[str]:
    """Text generated for these prompts in one batch, with a compressed cache passed to `generate`."""
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    enable_fused_attention(model)
    cache = CompressedCache(model.config, config)
    output = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], **with_cache(cache), **{**GREEDY, **how}
    )
    assert cache.packed_tokens > 0
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def test_pipeline(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """A pipeline with one prompt, and with three of different lengths in batches of two, gives the expected text."""
    pipe, config = pipeline("text-generation", model=model, tokenizer=tokenizer), mixed_config()
    texts = [text(60), text(75, 1), text(41, 2)]
    with compress(model, config) as handle:
        alone = pipe(texts[0], return_full_text=False, **GREEDY)
        assert handle.last_cache.packed_tokens >= 32
        batched = pipe(texts[:2], return_full_text=False, batch_size=2, **GREEDY)
        assert handle.last_cache.packed_tokens >= 64
        assert handle.last_cache.batch_size == 2
        assert len(pipe(texts, batch_size=2, **GREEDY)) == 3
    assert [alone[0]["generated_text"]] == expected(model, tokenizer, texts[:1], config)
    assert [one[0]["generated_text"] for one in batched] == expected(model, tokenizer, texts[:2], config)


def test_pipeline_chat(model: LlamaForCausalLM, tokenizer: Any) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chat = [{"role": "system", "content": text(20)}, {"role": "user", "content": text(40, 1)}]
    with compress(model, CONFIG) as handle:
        answer = pipe(chat, **GREEDY)[0]["generated_text"]
        assert handle.last_cache.packed_tokens >= 32
        again = pipe([*answer, {"role": "user", "content": text(9, 2)}], **GREEDY)[0]["generated_text"]
        assert handle.last_cache.packed_tokens >= 64
    assert [message["role"] for message in again] == ["system", "user", "assistant", "user", "assistant"]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False)
    assert [answer[-1]["content"]] == expected(model, tokenizer, [prompt])


def test_streaming(model: LlamaForCausalLM, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Streaming, to the screen or from a thread, gives the same text word by word."""
    prompt = text(60)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    whole = expected(model, tokenizer, [prompt])[0]
    with compress(model, CONFIG) as handle:
        model.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), **GREEDY)
        assert handle.last_cache.packed_tokens >= 32
        assert capsys.readouterr().out == whole + "\n"
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
        thread = Thread(target=model.generate, args=(ids,), kwargs={"streamer": streamer, **GREEDY})
        thread.start()
        parts = list(streamer)
        thread.join(timeout=120)
        assert handle.last_cache.packed_tokens >= 32
    assert len(parts) > 4
    assert "".join(parts) == whole


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    """`lm_eval`'s manager with two local tasks: one generates answers, the other scores given ones."""
    manager = pytest.importorskip("lm_eval.tasks", reason="lm_eval is not installed (extra `clients`)")
    rows = [{"text": text(60 + 9 * n, n), "answer": WORDS[n], "choices": WORDS[:3], "label": 1} for n in range(2)]
    (tmp_path / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    generated = {
        "task": "ours_generated",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": GREEDY["max_new_tokens"], "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    scored = {
        "task": "ours_scored",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    for task in (generated, scored):
        (tmp_path / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    return manager.TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_lm_eval(model: LlamaForCausalLM, tokenizer: Any, tasks: Any) -> None:
    """Generated answers come from the compressed cache; scores of given answers need no cache and do not change."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    def evaluate(task: str) -> list[Any]:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=256)
        found = simple_evaluate(model=lm, tasks=[task], task_manager=tasks, bootstrap_iters=0)
        assert task in found["results"]
        return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]

    dense_answers, dense_scores = evaluate("ours_generated"), evaluate("ours_scored")
    with compress(model, CONFIG) as handle:
        assert evaluate("ours_scored") == dense_scores
        assert handle.cache is None
        answers = evaluate("ours_generated")
        assert handle.last_cache.packed_tokens >= 64
        assert handle.last_cache.batch_size == 2
    assert answers != dense_answers
    texts = [text(60 + 9 * n, n) for n in range(2)]
    assert [answer[0][0] for answer in answers] == expected(model, tokenizer, texts)
