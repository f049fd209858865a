"""Some families of Transformers, shrunk, with compressed caches; `benchmarks/support_table.py --check` runs all."""

import logging
import re
from typing import Any

import pytest
import torch
import transformers
from support.cache_name import with_cache
from support.models.family_sweep import NOT_RUN, SIX_BITS, logits, prompt, verdict
from support.models.shrink import FAMILIES, small_config, small_model
from support.paths import ROOT
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from kvcache_compress import CompressedCache, compress

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
(PINNED,) = re.findall(r"^transformers==(.*)$", CONSTRAINTS, re.MULTILINE)
KINDS = {
    "falcon, alibi": ("unfused", False),
    "falcon, 3 queries per head": ("unfused", False),
    "llama, 7 queries per head": ("fused", False),
    "diffllama": ("unfused", False),
    "llama4": ("fails", False),
    "xlnet": ("refused", False),
    "gemma3": ("fused", True),
    "mllama": ("fused", True),
    "qwen2_5_vl": ("fused", True),
}
"""One case of each kind, its verdict, and whether an image was used."""
NO_EFFECT = "fused attention has no effect on "

pytestmark = pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"sizes and the page are for {PINNED}")


@pytest.mark.parametrize("case", KINDS)
def test_family(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without compression logits are exact; 6 bits pack; fused equals unfused; or there is a reason.

    Where fused attention never sees the packed tokens, a message says so, once.
    """
    with caplog.at_level(logging.WARNING, "kvcache_compress"):
        found = verdict(case)
    assert (found.kind, found.images) == KINDS[case]
    assert found.reason or found.kind == "fused"
    assert caplog.text.count(NO_EFFECT) == (found.reason == "transforms cached keys and values before it attends")
    if "queries per head" in case:
        assert f"{found.queries} queries per head" in case


def test_families_that_are_not_run_exist() -> None:
    assert set(NOT_RUN) <= set(FAMILIES)


@pytest.mark.parametrize("name", ["diffllama", "git"])
def test_without_effect_of_fused_attention_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Attention that repeats, expands or multiplies cached tensors itself decodes them; later blocks say no more."""
    model = small_model(small_config(name))
    inputs = prompt(model)
    for fused in (True, False, True, None):
        with compress(model, SIX_BITS, fused=fused) as block:
            logits(model, inputs, CompressedCache(model.config, SIX_BITS))
            model.generate(**inputs, max_new_tokens=3)
        assert block.last_cache.packed_tokens == 32
    assert caplog.text.count(f"{NO_EFFECT}{type(model).__name__}: its attention") == 1
    assert not [hook for hooks in (model._forward_hooks, model._forward_pre_hooks) for hook in hooks.values()]


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM) -> Any:
    return kind(small_config("llama")).eval()


def test_models_that_attend_fused_are_watched_for_one_step(caplog: pytest.LogCaptureFixture) -> None:
    """The hooks leave the model after its first step over packed tokens, and wait for one, also after an error."""
    model = llama()
    ids = torch.randint(1, 64, (1, 60))
    with compress(model, SIX_BITS, fused=True), torch.no_grad():
        model.generate(ids[:, :30], max_new_tokens=3)
        assert len(model._forward_hooks) == 1, "nothing was packed"
        cache = CompressedCache(model.config, SIX_BITS)
        model(ids, **with_cache(cache))
        with pytest.raises(IndexError):
            model(torch.tensor([[10**6]]), **with_cache(cache))
        model.model.layers[0].train()
        with torch.enable_grad():
            model(ids[:, :1], **with_cache(cache))
        assert len(model._forward_hooks) == 1, "gradients decode tokens in any model"
        model(ids[:, :1], **with_cache(cache))
        assert cache.packed_tokens == 32
        assert len(model._forward_hooks) == 0
    assert NO_EFFECT not in caplog.text


class Forgetful(LlamaForCausalLM):
    """A model whose `generate` never hands the cache on."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "use_cache": False}


def test_a_cache_that_stays_empty_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(1, 64, (1, 60))
    for kind, messages in ((LlamaForCausalLM, 0), (Forgetful, 1)):
        model = llama(kind)
        with compress(model, SIX_BITS) as block:
            for _ in range(2):
                model.generate(ids, max_new_tokens=2)
        assert (block.last_cache.packed_tokens > 0) == (not messages)
        assert caplog.text.count("nothing was compressed: Forgetful") == messages


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xlnet", "keeps a memory of its own"),
        ("reformer", "puts nothing into a cache"),
        ("minimax", "its own MiniMaxCache"),
        ("openai-gpt", "it takes no cache"),
        ("blip", "mix keys and values of the image with those of the text"),
        ("blt", "has no decoder whose cache could be compressed"),
        ("pi0", "has no decoder whose cache could be compressed"),
        ("dots3_note_text", "has no full-attention layer to compress"),
    ],
)
def test_models_that_cannot_use_the_cache_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*{reason}"):
        CompressedCache(AutoConfig.for_model(name), SIX_BITS)
