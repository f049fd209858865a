"""Codebooks of one prompt (`codebook: online`): shared by the rows of a batch, whose later tokens have no effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.models.small_model import VOCAB, small_model

from kvcache_compress import CompressedCache, enable_fused_attention

_ONLINE = {"method": "polarquant_recursive", "bits": [4, 2], "codebook": "online"}
CONFIG: dict[str, Any] = {
    "keys": {**_ONLINE, "center": "on", "radius_bits": 16}, "values": {**_ONLINE, "precondition": False},
    "sink_tokens": 4, "recent_tokens": 8, "backend": "torch",
}  # fmt: skip
TOLERANCE = {"atol": 1e-4, "rtol": 0}
pytestmark = pytest.mark.parametrize("capacity", [None, 120])


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model: Any, cache: CompressedCache, ids: torch.Tensor, step: int) -> torch.Tensor:
    return torch.cat([model(input_ids=part, **with_cache(cache)).logits for part in ids.split(step, 1)], 1)


@pytest.mark.parametrize("prompt", [3, 70])
def test_several_prompts_are_refused(prompt: int, capacity: int | None) -> None:
    """A batch of several prompts is refused at its first tokens, packed or not; the cache then accepts one prompt."""
    model, ids = small_model(), tokens(2, prompt)
    cache, alone = (CompressedCache(model.config, {**CONFIG, "max_cache_len": capacity}) for _ in range(2))
    for _ in range(3):  # no layer may accept later what it refused at first
        with pytest.raises(ValueError, match="codebook='online' for keys of polarquant_recursive, with 2 prompts"):
            feed(model, cache, ids, prompt)
        assert int(cache.get_seq_length()) == 0
    assert torch.equal(feed(model, cache, ids[:1], prompt), feed(model, alone, ids[:1], prompt))


@pytest.mark.parametrize(("prompt", "early", "fused"), [(2, False, True), (20, True, True), (70, False, False)])
def test_rows_of_one_prompt_are_as_alone(prompt: int, early: bool, fused: bool, capacity: int | None) -> None:
    """Rows that share a prompt give the same results as alone, however they continue and in any order."""
    model, ids = small_model(), torch.cat([tokens(1, prompt).repeat(3, 1), tokens(3, 49, 1)], 1)
    if fused:
        enable_fused_attention(model)
    alone = []
    for row in ids:
        cache = CompressedCache(model.config, {**CONFIG, "max_cache_len": capacity})
        feed(model, cache, row[None, :prompt], prompt)
        alone.append(feed(model, cache, row[None, prompt:], 7))
    for order in ([2, 0, 1],):
        cache = CompressedCache(model.config, {**CONFIG, "max_cache_len": capacity})
        feed(model, cache, ids[: 3 if early else 1, :prompt], prompt)
        if not early:
            cache.batch_repeat_interleave(3)
        got = feed(model, cache, ids[order, prompt:], 7)
        assert cache.packed_tokens > 0
        torch.testing.assert_close(got, torch.cat([alone[row] for row in order]), **TOLERANCE)


def test_beams(capacity: int | None) -> None:
    model = small_model()
    cache = CompressedCache(model.config, {**CONFIG, "max_cache_len": capacity})
    options = {"do_sample": False, "max_new_tokens": 45, "disable_compile": True, "num_beams": 3}
    assert model.generate(tokens(1, 5), **with_cache(cache), **options).shape[1] == 50
    assert cache.packed_tokens > 0
    cache.crop(-int(cache.get_seq_length()))
    with pytest.raises(ValueError, match="with 2 prompts"):
        feed(model, cache, tokens(2, 70), 70)
