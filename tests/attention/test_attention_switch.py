"""Switching fused attention on and off: nothing happens at import, and everything is restored."""

import copy
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import method_config, small_model
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import interface
from kvcache_compress.modeling.decoder import cache_argument

TURBOQUANT = method_config("turboquant")


def generate(model: PreTrainedModel, prompt: torch.Tensor, tokens: int = 8, **options: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **options)


PROBE = """
from transformers import cache_utils, masking_utils, modeling_utils, generation
from transformers.models.llama import modeling_llama
modules = (cache_utils, masking_utils, modeling_utils, generation.utils, modeling_llama)

def state():
    found = {"attention": sorted(modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()),
             "masks": sorted(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.keys()),
             "layers": sorted(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)}
    for module in modules:
        for name, value in vars(module).items():
            parts = {"": value, **(vars(value) if isinstance(value, type) else {})}
            found |= {(module.__name__, name, part): id(one) for part, one in parts.items() if callable(one)}
    return found

before = state()
import kvcache_compress
kvcache_compress.load_config("turboquant-4bit")
assert len(before) > 500 and before == state()
"""


def test_importing_patches_nothing() -> None:
    subprocess.run([sys.executable, "-c", PROBE], check=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_enable_and_disable(attention: str, prompt: torch.Tensor) -> None:
    model = small_model(attn_implementation=attention)
    expected = generate(model, prompt)
    enable_fused_attention(model)
    enable_fused_attention(model)
    assert interface.attends_fused(model)
    cache = CompressedCache(model.config, TURBOQUANT)
    fused = generate(model, prompt, **with_cache(cache))
    assert cache.packed_tokens > 0
    disable_fused_attention(model)
    assert model.config._attn_implementation == attention
    assert type(model.config._attn_implementation) is str
    disable_fused_attention(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(generate(model, prompt), expected)
    unfused = CompressedCache(model.config, TURBOQUANT)
    assert torch.equal(generate(model, prompt, **with_cache(unfused)), fused)


def test_a_copy_of_an_enabled_model(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """A copy of a model with fused attention has it too, with hooks of its own; each is switched off separately."""
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    expected = generate(model, prompt)
    enable_fused_attention(model)
    twin = copy.deepcopy(model)
    disable_fused_attention(model)
    assert interface.attends_fused(twin)
    assert torch.equal(generate(twin, prompt), expected)
    cache = CompressedCache(twin.config, TURBOQUANT)
    generate(twin, prompt, **with_cache(cache))
    assert cache.packed_tokens > 0
    disable_fused_attention(twin)
    assert twin.config._attn_implementation == "sdpa"
    for each in (model, twin):
        assert [len(module._forward_pre_hooks) for module in each.modules()] == hooks


def test_saving_an_enabled_model(model: LlamaForCausalLM, prompt: torch.Tensor, tmp_path: Path) -> None:
    """A saved model's config does not name this package, so that the model loads without it."""
    enable_fused_attention(model)
    model.save_pretrained(tmp_path)
    assert interface.ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    assert interface.ATTENTION_NAME not in json.dumps(model.config.to_dict(), default=str)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(generate(again, prompt), generate(model, prompt))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_are_bit_identical(attention: str, prompt: torch.Tensor) -> None:
    model = small_model(attn_implementation=attention)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0

    def runs() -> list[torch.Tensor]:
        options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        caches = [{}, {**with_cache(DynamicCache())}, {"use_cache": False}]
        caches.append({**with_cache(StaticCache(model.config, max_cache_len=70))})
        found = [torch.stack(generate(model, prompt, **options, **cache).logits) for cache in caches]
        with torch.no_grad():
            return [*found, model(prompt, attention_mask=mask).logits, model(prompt[:, :1]).logits]

    expected = runs()
    enable_fused_attention(model)
    assert all(torch.equal(a, b) for a, b in zip(runs(), expected, strict=True))


def test_arguments_are_in_the_order_of_transformers() -> None:
    """The attention function accepts its first arguments by position, as wrappers such as kvpress pass them."""
    functions = interface.attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]
    names = [list(inspect.signature(function).parameters)[:7] for function in functions]
    assert names[0] == names[1]


def test_compress_restores_after_errors(model: LlamaForCausalLM) -> None:
    with pytest.raises(KeyError, match="mine"), compress(model, TURBOQUANT):
        raise KeyError("mine")
    with (
        pytest.raises(ValueError, match="match=9"),
        compress(model, {**TURBOQUANT, "layers": [{"match": 9, "method": "none"}]}),
    ):
        pass
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_compress_leaves_own_caches_alone(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    with compress(model, TURBOQUANT) as handle:
        for name in {"past_key_values", cache_argument()}:
            own = DynamicCache()
            assert torch.equal(generate(model, prompt, **{name: own}), expected)
            assert own.get_seq_length() > 60
        assert torch.equal(generate(model, prompt, use_cache=False), expected)
        settings = copy.deepcopy(model.generation_config)
        settings.use_cache = False
        assert torch.equal(generate(model, prompt, generation_config=settings), expected)
        assert handle.cache is None


class BuiltIn(LlamaForCausalLM):
    """A model whose class has its attention built in, as Transformers reports it."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


@pytest.fixture
def stubborn(model: LlamaForCausalLM) -> LlamaForCausalLM:
    return BuiltIn(model.config).eval()


def test_attention_that_cannot_be_switched(stubborn: LlamaForCausalLM) -> None:
    before = stubborn.config._attn_implementation
    with pytest.raises(ValueError, match="BuiltIn"):
        enable_fused_attention(stubborn)
    with pytest.raises(ValueError, match="BuiltIn"), compress(stubborn, TURBOQUANT, fused=True):
        pass
    assert stubborn.config._attn_implementation == before
    assert "generate" not in vars(stubborn)


def test_compress_works_without_the_switch(stubborn: LlamaForCausalLM) -> None:
    """`compress` decodes at each step if attention cannot be switched, with the same tokens as an unfused cache."""
    prompt = torch.arange(1, 61)[None]
    cache = CompressedCache(stubborn.config, TURBOQUANT)
    expected = stubborn.generate(prompt, **with_cache(cache), max_new_tokens=6, do_sample=False)
    with compress(stubborn, TURBOQUANT) as handle:
        got = stubborn.generate(prompt, max_new_tokens=6, do_sample=False)
    assert handle.last_cache.packed_tokens > 0
    assert torch.equal(got, expected)


def test_other_models() -> None:
    for function in (enable_fused_attention, disable_fused_attention):
        with pytest.raises(ValueError, match="a transformers PreTrainedModel, or a PeftModel around one"):
            function(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "paged|eager", "org/kernel@v1:f", "wrapper|org/Kernel"])
def test_the_name_keeps_the_previous_one(name: str) -> None:
    fused = interface.fused_name(name)
    assert "flash" not in fused
    assert "/" not in fused
    config = SimpleNamespace(_attn_implementation=fused)
    assert interface._previous_name(config) == name
