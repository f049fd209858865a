"""Attention weights: fused attention has none, so a call that asks for them runs the previous attention."""

import pytest
import torch
from support.cache_name import with_cache
from support.models.family_cases import build, method_config
from transformers import PreTrainedModel

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention

CONFIG = method_config("llama", "turboquant")
SILENT = ["gpt2", "gpt_bigcode"]
"""Families whose attention modules do not pass the request for weights to the attention function."""
SWITCHED = [
    ("llama", False), ("llama", True), ("gpt2", False), ("gpt_bigcode", True), ("gemma4", False), ("falcon_h1", True),
    ("deepseek_v3", False),
]  # fmt: skip


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 64, (1, 30), generator=torch.Generator().manual_seed(0)).repeat(1, 2)


def filled(model: PreTrainedModel, ids: torch.Tensor) -> CompressedCache:
    cache = CompressedCache(model.config, CONFIG)
    model(input_ids=ids, **with_cache(cache))
    assert cache.packed_tokens == 32
    return cache


@pytest.mark.parametrize(("family", "by_config"), SWITCHED)
@torch.no_grad()
def test_weights_are_those_of_the_previous_attention(family: str, by_config: bool, ids: torch.Tensor) -> None:
    model = build(family, attn_implementation="eager")
    if by_config:
        model.config.output_attentions = True
    asked = {} if by_config else {"output_attentions": True}
    outputs = []
    for switch in (disable_fused_attention, enable_fused_attention):
        switch(model)
        cache = filled(model, ids)
        for count in (1, 5):
            outputs.append(model(input_ids=ids[:, :count], **with_cache(cache), **asked))
    for plain, fused in zip(outputs[:2], outputs[2:], strict=True):
        assert len(fused.attentions) == len(plain.attentions) > 0
        torch.testing.assert_close(fused.attentions, plain.attentions, atol=1e-4, rtol=0)
        torch.testing.assert_close(fused.logits, plain.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", *SILENT])
def test_generate_returns_weights(family: str, ids: torch.Tensor) -> None:
    model = build(family, attn_implementation="eager")
    enable_fused_attention(model)
    cache = CompressedCache(model.config, CONFIG)
    options = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 6}
    output = model.generate(ids, **with_cache(cache), **options)
    assert cache.packed_tokens > 0
    assert len(output.attentions) == 6
    for at, step in enumerate(output.attentions):
        assert len(step) == model.config.num_hidden_layers
        assert all(weights.shape[3] == ids.shape[1] + at for weights in step)
        assert all(torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-4) for weights in step)
