"""Early exit: the first layers draft, by a `generate` within the model's own, and the whole model verifies."""

from threading import Thread
from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import method_config, small_model
from transformers import LlamaForCausalLM

from kvcache_compress import (
    CompressedCache,
    compress,
    disable_fused_attention,
    enable_fused_attention,
    register_position_hooks,
)

LAYERS, PROMPT, NEW = 3, 60, 14
CONFIGS: dict[str, dict[str, Any]] = {
    name: method_config(name, LAYERS) for name in ("turboquant", "spectral", "commvq")
}
CONFIGS["layer-rule"] = {**method_config("turboquant"), "layers": [{"match": 2, "keys": {"method": "kivi", "bits": 4}}]}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_model(LAYERS)


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(1, 64, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def generate(model: LlamaForCausalLM, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, "assistant_early_exit": 1, **options})


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_own_cache_and_compress(model: LlamaForCausalLM, prompt: torch.Tensor, name: str, fused: bool) -> None:
    """Early exit gives the same tokens with an own cache and within `compress`, whose handle has the verifier's."""
    own = CompressedCache(model.config, CONFIGS[name])
    if fused:
        enable_fused_attention(model)
    register_position_hooks(model)
    expected = generate(model, prompt, **with_cache(own))
    assert own.packed_tokens > 0
    disable_fused_attention(model)
    with compress(model, CONFIGS[name], fused=fused) as handle:
        assert torch.equal(generate(model, prompt), expected)
        cache = handle.last_cache
        assert len(cache.layers) == model.config.num_hidden_layers == LAYERS
        assert cache.packed_tokens == own.packed_tokens
        assert cache.get_seq_length() == own.get_seq_length() >= PROMPT + NEW - 1


@pytest.mark.parametrize("fused", [False, True])
def test_without_compression_it_is_greedy(model: LlamaForCausalLM, prompt: torch.Tensor, fused: bool) -> None:
    """With a window so wide that nothing is packed, drafts, crops and steps of several tokens lose nothing."""
    expected = generate(model, prompt, assistant_early_exit=None)
    with compress(model, {**CONFIGS["turboquant"], "recent_tokens": 512}, fused=fused) as handle:
        assert torch.equal(generate(model, prompt), expected)
        assert handle.last_cache.get_seq_length() >= PROMPT + NEW - 1


def test_another_thread_is_no_draft(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:

    def call(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = Thread(target=generate, args=(model, prompt[:, :50]), kwargs={"assistant_early_exit": None})
        thread.start()
        thread.join()
        return scores

    with compress(model, CONFIGS["turboquant"]) as handle:
        generate(model, prompt, assistant_early_exit=None, logits_processor=[call])
        assert handle.last_cache.get_seq_length() == 50 + NEW - 1
        assert handle.last_cache.packed_tokens > 0


def test_after_an_exception(model: LlamaForCausalLM, prompt: torch.Tensor) -> None:

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with compress(model, CONFIGS["turboquant"]) as handle:
        with pytest.raises(KeyError, match="mine"):
            generate(model, prompt, assistant_early_exit=None, logits_processor=[fail])
        failed = handle.last_cache
        generate(model, prompt)
        assert handle.last_cache is not failed
        assert handle.last_cache.packed_tokens > 0
