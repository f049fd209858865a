"""All modes of `model.generate`: tokens are packed, and fused and unfused attention give the same text."""

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.oracle import few

from kvcache_compress import disable_fused_attention, enable_fused_attention

WAYS: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "many-returned": {"do_sample": True, "num_return_sequences": 3},
    "beams-returned": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "assisted": {},
}
NEW = 28
"""New tokens; enough that generated tokens are packed too."""


def generate(case: Any, cache: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return case.model.generate(ids, **with_cache(cache), **{"max_new_tokens": NEW, "disable_compile": True, **how})


@pytest.mark.parametrize("way", WAYS)
def test_fused_equals_not_fused(unfused: Any, assistant: Any, ids: Any, way: str, capacity: int | None) -> None:
    """Static caches give the tokens of growing ones. Assisted generation crops most tokens of a step again."""
    prompt, how = ids[:, :50], WAYS[way]
    if way in ("prompt-lookup", "assisted"):
        prompt = ids[:1, :25].repeat(1, 2)
        how = how or {"do_sample": False, "assistant_model": assistant}
    outputs = []
    for fused, room in ((False, None), (True, capacity)):
        (enable_fused_attention if fused else disable_fused_attention)(unfused.model)
        cache = unfused.cache(max_cache_len=room)
        outputs.append(generate(unfused, cache, prompt, **how))
        assert cache.packed_tokens >= 32
    assert outputs[0].shape[1] == 50 + NEW
    assert torch.equal(*outputs)


@few
def test_a_second_turn_continues_the_cache(case: Any, ids: torch.Tensor) -> None:
    """The next prompt of a chat is a chunk over a packed past; `generate` feeds only its new tokens."""
    cache, oracle = case.cache(), case.oracle()
    turns = []
    for one in (cache, oracle):
        first = generate(case, one, ids[:, :50], do_sample=False)
        turns.append(generate(case, one, torch.cat([first, ids[:, 50:90]], 1), do_sample=False))
    assert cache.packed_tokens > 64
    assert turns[0].shape[1] == 90 + 2 * NEW
    assert torch.equal(*turns)
