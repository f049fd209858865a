"""Prompts, chunks, steps, drafts, crops, batch operations and left padding, in growing and static caches.

The logits and the tokens held equal those of an independent oracle.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.closeness import FLIPPED, ROUNDING, assert_close_but_for_flips
from support.oracle import CONFIGS, KINDS, label

from kvcache_compress.storage.side import MAX_DECODE_TOKENS

TOLERANCE = {"atol": 1e-4, "rtol": 0}


@dataclass(frozen=True)
class Script:
    """Sizes of prompts, chunks and steps, and operations on the cache; with `padding` of the first row."""

    steps: tuple[Any, ...]
    padding: int = 0
    packed: int | None = None
    """Tokens packed at the end, where that is the same for all configurations."""


SCRIPTS = {
    "prompt, steps": Script((53, *[1] * 30), packed=64),
    "from the first token": Script((*[1] * 12, *[4] * 11)),
    "chunks": Script((40, 47, 20, 130, 1, 1)),
    "short chunks before anything is packed": Script((2, 17, 18, 40, 3)),
    "drafts": Script((61, *(5, ("crop", 3)) * 9), packed=64),
    "crop before anything is packed": Script((21, ("crop", 17), 2, ("crop", 4), 60, 1, 1)),
    "crop in the packed part": Script((61, 1, 13, ("crop", 40), ("crop", 12), 18, 16, 7, 45, 1)),
    "crop to sinks, crop beyond everything": Script((61, 14, ("crop", 72), 60, 3, ("crop", 140), 18, 2, 45, 1)),
    "rows": Script(
        (60, 1, 2, ("reorder", [1, 0, 0]), 5, 1, ("select", [2, 0]), ("repeat", 2), 15, ("crop", 50), 16, 16, 14, 4)
    ),
    "less padding than sinks, chunks": Script((60, 5, 5, 40, 1), padding=2),
    "more padding than sinks, steps": Script((70, *[1] * 12), padding=13),
    "padding that ends in a later chunk": Script((60, 16, 5, 30, 1), padding=68),
    "padding, crop into it": Script(
        (61, 14, ("crop", 52), 8, ("crop", 19), ("reorder", [1, 0]), 30, 2, 45), padding=13
    ),
}
SHORT = {name for name, script in SCRIPTS.items() if script.steps[0] < 45}
"""Scripts with a first prompt of which a static cache takes statistics, and a growing one does not."""
STATIC = [(name, True) for name in ("turboquant-4", "no-statistics", "polarquant-rope", "spectral-prefill")]
EVERY = (60, 1, ("reorder", [1, 0]), 5, 20, ("crop", 50), 16, 33, 1)


def play(case: Any, cache: Any, ids: torch.Tensor, steps: tuple[Any, ...], padding: int) -> torch.Tensor:
    """Logits `[n, vocab]` of all tokens that are not padding."""
    mask = torch.ones(2, 500, dtype=torch.long)
    mask[0, :padding] = 0
    rows, at, found = 2, 0, []
    for step in steps:
        if isinstance(step, int):
            past = int(cache.get_seq_length())
            logits = case.feed(cache, ids[:rows, at : at + step], mask=mask[:, : past + step] if padding else None)
            found.append(logits[mask[:, past : past + step].bool()] if padding else logits.flatten(0, 1))
            at += step
            continue
        operation, argument = step
        if operation == "crop":
            cache.crop(-argument)
        elif operation == "repeat":
            cache.batch_repeat_interleave(argument)
            rows *= argument
        else:
            rows, index = len(argument), torch.tensor(argument)
            cache.reorder_cache(index) if operation == "reorder" else cache.batch_select_indices(index)
            mask = mask[index] if padding else mask
    return torch.cat(found)


def check(case: Any, ids: torch.Tensor, steps: tuple[Any, ...], padding: int = 0, **changes: Any) -> Any:
    """Compare logits and all tokens of a compressed cache with the oracle's, and return the cache.

    C++ attention of chunks differs by rounding, which can flip codes; chunks use torch instead.
    """
    longest = max(step for step in steps[1:] if isinstance(step, int))
    chunks = longest > MAX_DECODE_TOKENS
    cache = case.cache(**({"backend": "torch"} if chunks else {}), **changes)
    oracle = case.oracle(**changes)
    ids = torch.cat([ids, ids.flip(1)]).repeat(1, 2)
    got, expected = (play(case, one, ids, steps, padding) for one in (cache, oracle))
    flips = chunks or padding or "max_cache_len" in changes or case.name == "spectral-prefill"
    close = assert_close_but_for_flips if flips else partial(torch.testing.assert_close, **TOLERANCE)
    close(got, expected)
    for layer, twin in zip(cache.layers, oracle.layers, strict=True):
        tokens = twin.get_seq_length()
        assert int(layer.get_seq_length()) == tokens
        assert getattr(layer, "packed_tokens", 0) == getattr(twin, "packed", 0)
        for ours, theirs in ((layer.keys, twin.keys), (layer.values, twin.values)):
            different = (ours[:, :, :tokens] - theirs).abs() > ROUNDING
            assert not tokens or different.double().mean() <= FLIPPED
    assert cache.packed_tokens > 0
    return cache


@pytest.mark.parametrize("name", SCRIPTS)
def test_growing(case: Any, ids: torch.Tensor, name: str) -> None:
    script = SCRIPTS[name]
    cache = check(case, ids, script.steps, script.padding)
    assert script.packed in (None, cache.packed_tokens)
    if case.fused and "crop" not in name:
        assert cache.padding.rows is None or cache.padding.rows.tokens.tolist() == [script.padding, 0]


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - SHORT))
@pytest.mark.parametrize("case", STATIC, indirect=True, ids=label)
@pytest.mark.parametrize("capacity", ["static", "static_shapes"], indirect=True)
def test_static(case: Any, ids: torch.Tensor, name: str, capacity: int) -> None:
    script = SCRIPTS[name]
    cache = check(case, ids, script.steps, script.padding, max_cache_len=capacity)
    assert cache.get_max_length() == capacity
    assert cache.is_compileable


@pytest.mark.parametrize("case", [(name, True) for name in CONFIGS if name not in KINDS], indirect=True, ids=label)
def test_every_configuration(case: Any, ids: torch.Tensor) -> None:
    check(case, ids, EVERY, padding=9)
