"""First use of a static layer: early allocation, short prompts, and updates without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cache_name import with_cache
from support.small_model import METHODS, VOCAB, method_config, small_model

from kvcache_compress import CompressedCache

PROMPT, STEPS, CAPACITY = 8, 60, 100
STARTS: dict[str, dict[str, Any]] = {name: method_config(name, 1) for name in METHODS}
STARTS["centred"] = {
    "keys": {"method": "turboquant", "center": "on"}, "values": "turboquant", "sink_tokens": 4, "recent_tokens": 8,
}  # fmt: skip
"""Methods under test; all but KIVI and CommVQ measure statistics on the first prompt."""


@torch.no_grad()
def logits(config: dict[str, Any], early: bool) -> torch.Tensor:
    """Logits of steps after a prompt so short that its length is that of a step."""
    model = small_model(1)
    cache = CompressedCache(model.config, {**config, "max_cache_len": CAPACITY})
    if early:
        cache.early_initialization(1, 2, 32, torch.float32, "cpu")
    ids = torch.randint(1, VOCAB, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    parts = [model(input_ids=x, **with_cache(cache)).logits for x in ids.split([PROMPT, *[1] * STEPS], 1)]
    assert cache.packed_tokens > 0
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.usefixtures("static_shapes")
def test_statistics_come_from_the_first_prompt_however_short(name: str) -> None:
    torch.testing.assert_close(logits(STARTS[name], early=True), logits(STARTS[name], early=False))


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("prompt", [1, 5, 16, 17])
@pytest.mark.parametrize("name", sorted(STARTS.keys() - {"commvq"}))
def test_a_first_prompt_of_which_nothing_is_packed(name: str, prompt: int, recent: int) -> None:
    """A first prompt that stays dense as a whole still sets the statistics: later tokens decode close to themselves."""
    model = small_model(1)
    windows = {"sink_tokens": 16, "recent_tokens": recent, "max_cache_len": CAPACITY}
    layer = CompressedCache(model.config, {**STARTS[name], **windows}).layers[0]
    keys, values = (torch.randn(1, 2, 90, 32, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for k, v in zip(
        keys.split([prompt, *[1] * (90 - prompt)], 2), values.split([prompt, *[1] * (90 - prompt)], 2), strict=True
    ):
        layer.update(k, v)
    assert layer.packed_tokens > 0
    for states, given in ((layer.keys, keys), (layer.values, values)):
        assert (states - given).norm() < given.norm()


@pytest.mark.parametrize("name", ["centred", "polarquant_recursive"])
def test_nothing_is_no_prompt(name: str) -> None:
    """An update without tokens sets no statistics."""
    model = small_model(1)
    keys, values = (torch.randn(1, 2, 90, 32, generator=torch.Generator().manual_seed(i)) for i in range(2))
    stored = []
    for first in (0, 90):
        layer = CompressedCache(model.config, {**STARTS[name], "max_cache_len": CAPACITY}).layers[0]
        for at in (first, 90):
            if layer.get_seq_length() < at or at == 0:
                layer.update(keys[:, :, :at], values[:, :, :at])
        stored.append(layer.keys)
    assert stored[0].isfinite().all()
    assert torch.equal(*stored)
