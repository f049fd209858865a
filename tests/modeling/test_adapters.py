"""Models that PEFT wraps: fused attention, `compress`, and adapters that have caches of their own."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, method_config, small_model
from support.recorded_paths import record_paths

from kvcache_compress import (
    CompressedCache,
    compress,
    disable_fused_attention,
    enable_fused_attention,
    register_position_hooks,
)
from kvcache_compress.attention.interface import attends_fused
from kvcache_compress.modeling.decoder import cache_argument

peft = pytest.importorskip("peft", reason="peft is not installed (extra `clients`)")
CONFIG = method_config("turboquant")
GREEDY = {"max_new_tokens": 6, "do_sample": False}
VIRTUAL = 6
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"init_lora_weights": False, "target_modules": ["q_proj", "k_proj", "v_proj"]}),
    "ia3": ("IA3Config", {"init_ia3_weights": False, "target_modules": ["k_proj"], "feedforward_modules": []}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": VIRTUAL}),
}


def adapted(kind: str, options: dict[str, Any]) -> Any:
    base = small_model()
    torch.manual_seed(1)
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()


@pytest.fixture(params=ADAPTERS)
def model(request: pytest.FixtureRequest) -> Any:
    made = adapted(*ADAPTERS[request.param])
    if made.active_peft_config.is_prompt_learning:
        # PEFT 0.21 looks for the cache under its name before Transformers 5.24, and adds the virtual tokens again.
        ids = torch.ones(1, 4, dtype=torch.long)
        plain = made.generate(input_ids=ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        if plain[cache_argument()].get_seq_length() != 4 + VIRTUAL + 1:
            pytest.skip("this PEFT repeats its virtual tokens in each step, with any cache")
    return made


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, 90), generator=torch.Generator().manual_seed(0))


def test_compress(model: Any, prompt: torch.Tensor) -> None:
    """The wrapper's `generate` uses the compressed cache, and the model is restored after the block."""
    base = model.get_base_model()
    expected = model.generate(input_ids=prompt, **GREEDY)
    virtual = VIRTUAL if model.active_peft_config.is_prompt_learning else 0
    for fused in (True, False):
        with compress(model, {**CONFIG, "recent_tokens": 200}, fused=fused) as exact:
            assert attends_fused(base) == fused
            assert torch.equal(model.generate(input_ids=prompt, **GREEDY), expected)
            assert exact.last_cache.get_seq_length() == 95 + virtual
        with compress(model, CONFIG, fused=fused) as block:
            assert model.generate(input_ids=prompt, **GREEDY).shape == expected.shape
            assert block.last_cache.packed_tokens > 0
    assert "generate" not in vars(base)
    assert base.config._attn_implementation == "sdpa"


def test_fused_attention(model: Any, prompt: torch.Tensor) -> None:
    """Fused attention gives the same logits through the wrapper, also with a cache of another config object.

    IA3's random factors make outlier channels, which only fused attention equalizes by the queries.
    """
    outputs, config = [], {**CONFIG, "keys": {**CONFIG["keys"], "equalize": "off"}}
    for switch in (disable_fused_attention, enable_fused_attention):
        switch(model)
        for model_config in (model.config, small_model().config):
            cache = CompressedCache(model_config, config)
            options = {"output_logits": True, "return_dict_in_generate": True}
            with record_paths() as taken:
                output = model.generate(input_ids=prompt, **with_cache(cache), **GREEDY, **options)
            assert cache.packed_tokens > 0
            backend = cache.layers[0].backend.name
            assert taken == ([(backend, 1)] * 2 * 5 if switch is enable_fused_attention else [])
            outputs.append(torch.stack(output.logits))
    for one in outputs[1:]:
        torch.testing.assert_close(one, outputs[0], atol=1e-4, rtol=0)
    disable_fused_attention(model)
    assert model.config._attn_implementation == "sdpa"
    register_position_hooks(model)
    assert any(module._forward_pre_hooks for module in model.get_base_model().modules())


@pytest.mark.parametrize("switch", [enable_fused_attention, lambda model: compress(model, CONFIG).__enter__()])
def test_prefix_tuning_is_refused(switch: Any) -> None:
    model = adapted("PrefixTuningConfig", {"num_virtual_tokens": VIRTUAL})
    with pytest.raises(ValueError, match="its adapter is of type PREFIX_TUNING"):
        switch(model)
    disable_fused_attention(model)
    assert model.config._attn_implementation == "sdpa"
    assert "generate" not in vars(model.get_base_model())
