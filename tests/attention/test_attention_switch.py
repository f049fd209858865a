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
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention.interface import ATTENTION_NAME, attention_forward
from kvcache_compress.modeling.decoder import cache_argument

TURBOQUANT: dict[str, Any] = {
    "keys": {"method": "turboquant", "bits": 4},
    "values": {"method": "turboquant", "bits": 4},
    "sink_tokens": 4,
    "recent_tokens": 8,
}


def make(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> LlamaForCausalLM:
    return make()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, 64, (2, 60), generator=torch.Generator().manual_seed(0))


def generate(model: PreTrainedModel, prompt: torch.Tensor, tokens: int = 8, **options: Any) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, **options)


PROBE = """
import json, transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import cache_utils, masking_utils, modeling_utils, generation
from transformers.models.llama import modeling_llama
modules = (cache_utils, masking_utils, modeling_utils, generation.utils, modeling_llama)

def state():
    found = {"attention": sorted(modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()),
             "masks": sorted(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.keys()),
             "layers": sorted(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)}
    for module in modules:
        for name, value in vars(module).items():
            if callable(value):
                found[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type):
                found |= {f"{module.__name__}.{name}.{k}": id(v) for k, v in vars(value).items() if callable(v)}
    return found

before = state()
import kvcache_compress
kvcache_compress.load_config("turboquant-4bit")
after = state()
print(json.dumps([len(before), sorted(k for k in before | after if before.get(k) != after.get(k))]))
"""


def test_importing_patches_nothing() -> None:
    """In a fresh process, Transformers' registries, classes and functions are the same objects before and after."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    looked_at, changed = json.loads(done.stdout)
    assert looked_at > 500
    assert changed == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_enable_and_disable(attention: str, prompt: torch.Tensor) -> None:
    model = make(attention)
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
    model = make(attention)
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


def test_compress_restores_after_an_exception(model: LlamaForCausalLM) -> None:
    with pytest.raises(KeyError, match="mine"), compress(model, TURBOQUANT):
        raise KeyError("mine")
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


def test_compress_with_a_bad_config_changes_nothing(model: LlamaForCausalLM) -> None:
    with (
        pytest.raises(ValueError, match="match=9"),
        compress(model, {**TURBOQUANT, "layers": [{"match": 9, "method": "none"}]}),
    ):
        pass
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


def test_compress_fused_or_not(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    outputs = []
    for fused in (True, False, None):
        with compress(model, TURBOQUANT, fused=fused) as handle:
            assert (model.config._attn_implementation == ATTENTION_NAME) == (fused is not False)
            outputs.append(generate(model, prompt))
            assert handle.last_cache.packed_tokens > 0
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_compress_on_an_enabled_model(model: LlamaForCausalLM) -> None:
    """Leaving a block restores the switch, and `fused=False` applies within it."""
    enable_fused_attention(model)
    with compress(model, TURBOQUANT):
        assert model.config._attn_implementation == ATTENTION_NAME
    with compress(model, TURBOQUANT, fused=False):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == ATTENTION_NAME


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


def test_compress_serves_generation_configs(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:
    """A generation config works by keyword and by position, with beams and several sequences."""
    settings = copy.deepcopy(model.generation_config)
    settings.max_new_tokens = 5
    with compress(model, TURBOQUANT) as handle:
        for arguments in ((prompt, settings), (prompt,)):
            model.generate(*arguments, **({} if len(arguments) == 2 else {"generation_config": settings}))
            assert handle.last_cache.packed_tokens > 0
        got = generate(model, prompt, num_beams=3, num_return_sequences=2)
        assert got.shape == (4, 68)
        assert handle.last_cache.packed_tokens > 0


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


def test_pipeline_inside_compress(model: LlamaForCausalLM) -> None:
    """A client that only calls `generate` uses the compressed cache without knowing it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(WordLevel({f"w{i:02d}": i for i in range(64)}, unk_token="w01"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w00", unk_token="w01", padding_side="left")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = " ".join(f"w{i % 60 + 2:02d}" for i in range(70))
    with compress(model, TURBOQUANT) as handle:
        (answer,) = pipe(text, max_new_tokens=6, do_sample=False)
        assert handle.last_cache.packed_tokens > 0
        assert handle.last_cache.get_seq_length() == 75
    assert answer["generated_text"].startswith(text)
