"""Switching fused attention on and off: nothing happens at import, and everything is restored."""

import copy
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config, small_model
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.interface import ATTENTION_NAME, attention_forward
from kvcache_compress.modeling.decoder import cache_argument

TURBOQUANT = method_config("turboquant")


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_model()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))


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
    """In a fresh process, Transformers' registries, classes and functions are the same objects before and after."""
    subprocess.run([sys.executable, "-c", PROBE], check=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_enable_and_disable(attention: str, prompt: torch.Tensor) -> None:
    model = small_model(attn_implementation=attention)
    expected = generate(model, prompt)
    enable_fused_attention(model)
    enable_fused_attention(model)
    assert model.config._attn_implementation == ATTENTION_NAME
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
    """A copy of a model with fused attention has it too, and each is switched off separately."""
    expected = generate(model, prompt)
    enable_fused_attention(model)
    twin = copy.deepcopy(model)
    disable_fused_attention(model)
    assert twin.config._attn_implementation == ATTENTION_NAME
    assert torch.equal(generate(twin, prompt), expected)
    cache = CompressedCache(twin.config, TURBOQUANT)
    generate(twin, prompt, **with_cache(cache))
    assert cache.packed_tokens > 0
    disable_fused_attention(twin)
    assert twin.config._attn_implementation == "sdpa"


def test_saving_an_enabled_model(model: LlamaForCausalLM, prompt: torch.Tensor, tmp_path: Path) -> None:
    """A saved model's config does not name this package, so that the model loads without it."""
    enable_fused_attention(model)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    assert ATTENTION_NAME not in json.dumps(model.config.to_dict(), default=str)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(generate(again, prompt), generate(model, prompt))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_are_bit_identical(attention: str, prompt: torch.Tensor) -> None:
    """With fused attention on, other caches go through the previous attention: logits are equal bit for bit."""
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


def test_arguments_are_in_the_order_of_transformers(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """The attention function accepts its first six arguments by position, as wrappers such as kvpress pass them."""
    names = [list(inspect.signature(f).parameters)[:7] for f in (attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"])]
    assert names[0] == names[1]
    enable_fused_attention(model)
    expected = generate(model, prompt, **with_cache(CompressedCache(model.config, TURBOQUANT)))

    def wrapper(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float, **kwargs: Any
    ) -> Any:
        return attention_forward(module, query, key, value, attention_mask, dropout, **kwargs)

    ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = wrapper
    try:
        cache = CompressedCache(model.config, TURBOQUANT)
        assert torch.equal(generate(model, prompt, **with_cache(cache)), expected)
        assert cache.packed_tokens > 0
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]


# compress()


def test_compress_restores(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    expected = generate(model, prompt)
    with compress(model, TURBOQUANT) as handle:
        with pytest.raises(RuntimeError, match="no cache yet"):
            _ = handle.last_cache
        assert model.config._attn_implementation == ATTENTION_NAME
        generate(model, prompt)
        first = handle.last_cache
        assert first.packed_tokens > 0
        generate(model, prompt[:, :40])
        assert handle.last_cache is not first, "each call gets a cache of its own"
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, prompt), expected)


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


@pytest.mark.parametrize("enabled", [False, True])
def test_compress_fused_or_not(model: LlamaForCausalLM, prompt: torch.Tensor, enabled: bool) -> None:
    """Leaving a block restores the switch, and `fused` applies within it."""
    if enabled:
        enable_fused_attention(model)
    before, outputs = model.config._attn_implementation, []
    for fused in (True, False, None):
        with compress(model, TURBOQUANT, fused=fused) as handle:
            assert (model.config._attn_implementation == ATTENTION_NAME) == (fused is not False)
            outputs.append(generate(model, prompt))
            assert handle.last_cache.packed_tokens > 0
        assert model.config._attn_implementation == before
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_compress_nested(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """The innermost block applies, and the outer one again after it."""
    with compress(model, TURBOQUANT) as outer:
        with compress(model, {**TURBOQUANT, "keys": "kivi"}) as inner:
            generate(model, prompt)
            assert inner.last_cache.compression.keys.method == "kivi"
            assert outer.cache is None
        generate(model, prompt)
        assert outer.last_cache.packed_tokens > 0
        assert model.config._attn_implementation == ATTENTION_NAME
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


def test_compress_overrides_a_cache_implementation(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    with compress(model, TURBOQUANT) as handle:
        expected = generate(model, prompt)
        assert torch.equal(generate(model, prompt, cache_implementation="static"), expected)
        model.generation_config.cache_implementation = "static"
        assert torch.equal(generate(model, prompt), expected)
        assert handle.last_cache.packed_tokens > 0
    assert model.generation_config.cache_implementation == "static"
    model.generation_config.cache_implementation = None


def test_flash_attention_is_asked_for_by_its_own_name(
    model: LlamaForCausalLM, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous flash attention runs under its own name, as its function reads its version from the config."""
    seen = []

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append(module.config._attn_implementation)
        return sdpa(module, query, key, value, mask, **kwargs)

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    expected = generate(model, prompt, **with_cache(CompressedCache(model.config, TURBOQUANT)))
    model.config._attn_implementation_internal = "flash_attention_2"
    enable_fused_attention(model)
    cache = CompressedCache(model.config, TURBOQUANT)
    assert torch.equal(generate(model, prompt, **with_cache(cache)), expected)
    assert cache.packed_tokens > 0
    assert seen
    assert set(seen) == {"flash_attention_2"}
    assert model.config._attn_implementation == "kvcache_compress"
