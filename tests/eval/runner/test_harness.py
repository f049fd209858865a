"""lm-eval's tasks through a cache: likelihoods of answers token by token, rolling likelihoods, generated answers."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config
from support.models.toy_tokenizers import word_tokenizer
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcache_compress import CompressedCache
from kvcache_compress.eval.caches.caches import preset_cache

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra `clients`)")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvcache_compress.eval.runner.harness import CachedLM

WORDS = [f"w{index}" for index in range(VOCAB - 2)]
CONFIG = method_config("kivi")
POSITIONS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per word."""
    return word_tokenizer(["<end>", "<unk>", *WORDS], unk_token="<unk>", eos_token="<end>", pad_token="<end>")


def text(tokens: int, seed: int = 0) -> str:
    picked = torch.randint(len(WORDS), (tokens,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[index] for index in picked)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


QUESTIONS = [(text(90), " " + answer) for answer in (text(1, 1), text(4, 2))] + [(text(60, 3), " " + text(3, 4))]


def test_full_cache_scores_as_one_pass_does(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """With the full cache, scores are HFLM's: for shared, empty and too long contexts, and for rolling windows."""
    asked = [*QUESTIONS, ("", text(3, 5)), (text(POSITIONS + 40, 6), " " + text(7, 7))]
    options = {"pretrained": model, "tokenizer": tokenizer, "max_length": POSITIONS}
    dense, ours = HFLM(**options), CachedLM(cache="full", **options)
    for kind, given in (("loglikelihood", asked), ("loglikelihood_rolling", [(text(POSITIONS + 60, 8),)])):
        expected, found = (getattr(lm, kind)(requests(kind, *given)) for lm in (dense, ours))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-5)
    assert set(ours.packed_tokens) == {0}


def test_answers_are_scored_after_a_compressed_context(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """The context's last token and the answer, but for its last, meet the context as the cache keeps it."""
    lm = CachedLM(cache=preset_cache(CONFIG, name="kivi"), pretrained=model, tokenizer=tokenizer)
    found = lm.loglikelihood(requests("loglikelihood", *QUESTIONS))
    assert min(lm.packed_tokens) >= 32
    for (context, answer), (likelihood, greedy) in zip(QUESTIONS, found, strict=True):
        context_ids, ids = (tokenizer(part, return_tensors="pt").input_ids for part in (context, answer))
        by_cache = []
        for cache in (CompressedCache(model.config, CONFIG), DynamicCache()):
            parts = [context_ids[:, :-1], context_ids[:, -1:], *ids[:, :-1].split(1, 1)]
            with torch.no_grad():
                logits = [model(part, **with_cache(cache)).logits[0] for part in parts if part.numel()]
            logprobs = torch.cat(logits)[-ids.shape[1] :].log_softmax(-1)
            by_cache.append((logprobs.gather(1, ids.T).sum().item(), bool((logprobs.argmax(-1) == ids[0]).all())))
        assert likelihood == pytest.approx(by_cache[0][0], abs=1e-4)
        assert abs(likelihood - by_cache[1][0]) > 1e-3
        assert greedy == by_cache[0][1]


def test_generated_answers_come_from_the_cache(model: LlamaForCausalLM, tokenizer: Any) -> None:
    given = requests("generate_until", (text(80), {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}))
    lm = CachedLM(cache=preset_cache(CONFIG, name="kivi"), pretrained=model, tokenizer=tokenizer, max_length=POSITIONS)
    ids = tokenizer(text(80), return_tensors="pt")
    cache = CompressedCache(model.config, CONFIG)
    output = model.generate(**ids, **with_cache(cache), max_new_tokens=12, do_sample=False)
    assert lm.generate_until(given) == [tokenizer.decode(output[0, 80:], skip_special_tokens=True)]
    assert lm.packed_tokens == [cache.packed_tokens]
    assert cache.packed_tokens >= 32
