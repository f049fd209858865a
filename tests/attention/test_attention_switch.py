"""Fused attention switched on and off, which restores everything; options of calls that keep a step fused or not."""

import copy
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models import family_cases
from support.models.small_model import VOCAB, method_config, small_model
from support.recorded_paths import record_paths
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache_compress import CompressedCache, compress, disable_fused_attention, enable_fused_attention
from kvcache_compress.attention import interface
from kvcache_compress.attention.interface import attention_forward
from kvcache_compress.codecs.mask import AttentionCall
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
    functions = attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]
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


LENGTHS = torch.tensor([0, 1])
IDLE: dict[str, Any] = {
    "output_router_logits": True, "num_items_in_batch": torch.tensor(3), "max_length_q": 1, "max_length_k": 61,
    "seq_idx": torch.zeros(1, 1, dtype=torch.int32), "cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS,
    "is_causal": False, "sliding_window": 1024, "return_shared_kv_states": True,
}  # fmt: skip
"""Options of a step of one token that change nothing for eager attention and SDPA."""


@pytest.fixture(autouse=True)
def _start() -> None:
    interface._warn_once.cache_clear()


def unsupported(model: PreTrainedModel, query: torch.Tensor, mask: Any, options: dict[str, Any]) -> str | None:
    return interface._unsupported(AttentionCall.of(query, mask, scaling=1.0), model, mask, 0.0, options)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (1, 70), generator=torch.Generator().manual_seed(0))


def stepped(
    model: PreTrainedModel, ids: torch.Tensor, tokens: int = 1, **options: Any
) -> tuple[torch.Tensor, set[str], CompressedCache]:
    """Logits of a step after a prompt of 60 tokens, the paths of its layers, and the cache."""
    cache = CompressedCache(model.config, method_config("turboquant"))
    with torch.no_grad():
        model(input_ids=ids[:, :60], **{cache_argument(): cache})
        assert cache.packed_tokens > 0
        with record_paths() as taken:
            logits = model(input_ids=ids[:, 60 : 60 + tokens], **{cache_argument(): cache}, **options).logits
    assert taken
    return logits, {one.path for one in taken}, cache


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_options_that_change_nothing(previous: str, ids: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model(attn_implementation=previous)
    enable_fused_attention(model)
    expected, fused, cache = stepped(model, ids)
    assert fused == {cache.layers[0].backend.name}
    for name, value in IDLE.items():
        logits, taken, _ = stepped(model, ids, **{name: value})
        assert taken == fused, name
        assert torch.equal(logits, expected), name
    assert not caplog.records


def test_unknown_options_are_named_once(ids: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    enable_fused_attention(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert stepped(model, ids, tokens=1, temperature_of_heads=0.5)[1] == {"decode"}
            assert stepped(model, ids, tokens=3, position_bias=torch.zeros(1, 1, 3, 63))[1] == {"decode"}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "does not support the option temperature_of_heads" in messages[0]
    assert "does not support the option position_bias" in messages[1]


def test_dropout_and_masks_of_flex_attention_are_named(ids: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model(attention_dropout=0.5)
    enable_fused_attention(model)
    model.train()
    assert stepped(model, ids)[1] == {"decode"}
    assert "dropout, which model.eval() switches off" in caplog.text
    assert unsupported(model, torch.zeros(1, 1, 1, 4), object(), {}) == "masks of type object"


def test_several_tokens_that_are_not_causal() -> None:
    """Without a mask they see each other, which no fused path computes; a mask over tokens says what they see."""
    model = small_model()
    query = torch.zeros(1, 4, 3, 32)
    for mask in (None, torch.ones(1, 63)):
        assert "is_causal=False" in str(unsupported(model, query, mask, {"is_causal": False}))
        assert unsupported(model, query, mask, {"is_causal": None}) is None
    assert unsupported(model, query, torch.ones(1, 1, 3, 63), {"is_causal": False}) is None


def test_packed_sequences_of_flash_attention(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flash attention reads `cu_seq_lens_*` and windows in place of a mask, so such a step is its own."""
    seen = []

    def flash(module: Any, *args: Any, **options: Any) -> Any:
        seen.append(options.get("cu_seq_lens_q"))
        assert module.config._attn_implementation == "flash_attention_2", "it reads its version from the config"
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    masks = ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(masks._local_mapping, "flash_attention_2", masks["sdpa"])
    model = small_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    enable_fused_attention(model)
    assert "decode" not in stepped(model, ids, max_length_q=1)[1]
    seen.clear()
    lengths = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS, "max_length_q": 1, "max_length_k": 61}
    assert stepped(model, ids, **lengths)[1] == {"decode"}
    assert seen[-1] is LENGTHS
    assert "the option cu_seq_lens_q" in caplog.text
    assert stepped(model, ids, sliding_window=1024)[1] == {"decode"}
    assert interface.attends_fused(model)


CONFIG = family_cases.method_config("llama", "turboquant")
SWITCHED = [
    ("llama", False), ("llama", True), ("gpt2", False), ("gpt_bigcode", True), ("gemma4", False), ("falcon_h1", True),
    ("deepseek_v3", False),
]  # fmt: skip


@pytest.fixture
def twice() -> torch.Tensor:
    return torch.randint(1, 64, (1, 30), generator=torch.Generator().manual_seed(0)).repeat(1, 2)


def filled(model: PreTrainedModel, twice: torch.Tensor) -> CompressedCache:
    cache = CompressedCache(model.config, CONFIG)
    model(input_ids=twice, **with_cache(cache))
    assert cache.packed_tokens == 32
    return cache


@pytest.mark.parametrize(("family", "by_config"), SWITCHED)
@torch.no_grad()
def test_weights_are_those_of_the_previous_attention(family: str, by_config: bool, twice: torch.Tensor) -> None:
    model = family_cases.build(family, attn_implementation="eager")
    if by_config:
        model.config.output_attentions = True
    asked = {} if by_config else {"output_attentions": True}
    outputs = []
    for switch in (disable_fused_attention, enable_fused_attention):
        switch(model)
        cache = filled(model, twice)
        for count in (1, 5):
            outputs.append(model(input_ids=twice[:, :count], **with_cache(cache), **asked))
    for plain, fused in zip(outputs[:2], outputs[2:], strict=True):
        assert len(fused.attentions) == len(plain.attentions) > 0
        torch.testing.assert_close(fused.attentions, plain.attentions, atol=1e-4, rtol=0)
        torch.testing.assert_close(fused.logits, plain.logits, atol=1e-4, rtol=0)
