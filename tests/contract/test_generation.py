"""`model.generate` in all its ways: it runs, packs tokens, and fused and not fused agree."""

from typing import Any

import pytest
import torch

from kvcache_compress import CompressedCache, disable_fused_attention, enable_fused_attention

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "many-returned": {"do_sample": True, "num_return_sequences": 3},
    "beams-returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
}
NEW = 28
"""Enough that generated tokens are packed too."""


def generate(case: Any, cache: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return case.model.generate(ids, past_key_values=cache, max_new_tokens=NEW, **how)


@pytest.mark.parametrize("way", WAYS)
def test_fused_equals_not_fused(unfused: Any, ids: torch.Tensor, way: str) -> None:
    outputs = []
    for fused in (False, True):
        (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
        cache = unfused.cache()
        outputs.append(generate(unfused, cache, ids[:, :50], **WAYS[way]))
        assert cache.packed_tokens >= 64, "generated tokens were packed as well"
    assert outputs[0].shape[1] == 50 + NEW
    assert torch.equal(*outputs)


@pytest.mark.parametrize("way", ["prompt-lookup", "assisted"])
def test_speculative(unfused: Any, assistant: Any, ids: torch.Tensor, way: str) -> None:
    """Several tokens per step, most of them cropped away again."""
    prompt = ids[:1, :25].repeat(1, 2)
    how = {"prompt_lookup_num_tokens": 4} if way == "prompt-lookup" else {"assistant_model": assistant}
    outputs = []
    for fused in (False, True):
        (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
        cache = unfused.cache()
        outputs.append(generate(unfused, cache, prompt, do_sample=False, **how))
        assert cache.packed_tokens > 0
    assert torch.equal(*outputs)


def test_speculative_without_compression_is_greedy(tiny_model: Any, assistant: Any, ids: torch.Tensor) -> None:
    """With nothing but a wide window the assisted tokens are the greedy ones: crop and steps lose nothing."""
    prompt = ids[:1, :50]
    plain = tiny_model.generate(prompt, max_new_tokens=NEW, do_sample=False)
    config = {"keys": {"method": "turboquant"}, "values": {"method": "turboquant"}, "recent_tokens": 512}
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        cache = CompressedCache(tiny_model.config, config)
        got = tiny_model.generate(prompt, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **how)
        assert torch.equal(got, plain)


def test_a_second_turn_continues_the_cache(case: Any, ids: torch.Tensor) -> None:
    """The next prompt of a chat is a chunk on a packed past; generate feeds only what is new."""
    cache, oracle = case.cache(), case.oracle()
    turns = []
    for one in (cache, oracle):
        first = generate(case, one, ids[:, :50], do_sample=False)
        turns.append(generate(case, one, torch.cat([first, ids[:, 50:90]], 1), do_sample=False))
    assert cache.packed_tokens > 64
    assert turns[0].shape[1] == 90 + 2 * NEW
    assert torch.equal(*turns)


def test_left_padded_batch(case: Any, ids: torch.Tensor) -> None:
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :11] = 0
    prompt = ids[:, :60].masked_fill(mask == 0, 0)
    outputs = []
    for cache in (case.cache(), case.oracle()):
        outputs.append(generate(case, cache, prompt, attention_mask=mask, do_sample=False))
    assert torch.equal(*outputs)
