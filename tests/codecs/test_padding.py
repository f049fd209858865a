"""Left padding: exchange of sinks against loops over rows and tokens, and what caches learn of it from masks."""

import logging
from typing import Any

import pytest
import torch

from kvcache_compress.codecs.mask import Mask, left_padding
from kvcache_compress.codecs.padding import LeftPadding
from kvcache_compress.storage.shared import padding as module
from kvcache_compress.storage.shared.padding import PaddingRecord

SINKS = 4


def order(padding: int, tokens: int) -> list[int]:
    """Token at each stored position of a row."""
    found = list(range(tokens))
    for i in range(min(padding, SINKS)):
        other = max(padding, SINKS) + i
        if other < tokens:
            found[i], found[other] = other, i
    return found


def padding(*rows: int) -> LeftPadding:
    return LeftPadding(torch.tensor(rows), max(rows))


@pytest.mark.parametrize("kind", ["none", "padding", "bool", "additive", "one for all rows"])
def test_masks_follow_their_tokens(kind: str) -> None:
    rows, total, count = (0, 2, 5, 17), 24, 3
    made = padding(*rows)
    real = torch.arange(total) >= torch.tensor(rows)[:, None]
    causal = torch.ones(count, total, dtype=torch.bool).tril(total - count)[None, None]
    seen = causal.expand(len(rows), 1, -1, -1) if kind in ("none", "one for all rows") else causal & real[:, None, None]
    masks = {
        "none": None,
        "padding": real.long(),
        "bool": seen,
        "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf),
        "one for all rows": causal,
    }
    got = Mask(masks[kind]).exchanged(made, SINKS, count, total, torch.device("cpu")).tensor
    expected = torch.stack([one[..., order(n, total)] for n, one in zip(rows, seen, strict=True)])
    assert torch.equal(got if got.dtype == torch.bool else got == 0, expected)


def test_tokens_without_padding() -> None:
    rows, total = (0, 2, 5, 17), 20
    made, x = padding(*rows), torch.randn(len(rows), 2, total, 8)
    stored = torch.stack([one[:, order(n, total)] for n, one in zip(rows, x, strict=True)])
    real = [stored[row, :, SINKS + n :] for row, n in enumerate(rows)]
    assert torch.equal(made.without(stored[:, :, SINKS:], SINKS, SINKS), torch.cat(real, 1)[None])
    assert made.without(stored, SINKS, 0).shape == (1, 2, total * len(rows) - sum(rows), 8)
    alone = padding(20).without(x[:1], SINKS, 0)
    assert torch.equal(alone, x[:1]), "padding alone is better than nothing"


MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])


def four_dimensional(mask: torch.Tensor, queries: int = 5) -> torch.Tensor:
    causal = torch.ones(queries, 5, dtype=torch.bool).tril(5 - queries)
    return causal & mask[:, None, None].bool()


@pytest.mark.parametrize(
    "mask",
    [
        MASK,
        MASK.bool(),
        four_dimensional(MASK),
        four_dimensional(MASK, 1),
        torch.zeros(3, 2, 5, 5).masked_fill(~four_dimensional(MASK), torch.finfo(torch.float32).min),
        {"full_attention": four_dimensional(MASK), "sliding_attention": None},
    ],
    ids=["2d", "bool", "4d", "one query", "additive", "by kind"],
)
def test_masks(mask: Any) -> None:
    """Padding is what no query sees before a row's first token, whatever is hidden later."""
    found = left_padding(mask)
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([3, 0, 1], 5)


@pytest.mark.parametrize("mask", [None, {"sliding_attention": MASK}, "flex", torch.zeros(3, 0)])
def test_what_is_not_a_mask(mask: Any) -> None:
    assert left_padding(mask) is None


def test_a_batch_that_never_arrived_is_forgotten() -> None:
    """A forward that fails before its first layer leaves nothing for a batch of another size."""
    record = PaddingRecord()
    record.receive(MASK, 0)
    record.begin(torch.randn(2, 1, 5, 8))
    assert record.rows is None


def test_unknown_padding_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    module._warn_once.cache_clear()
    x = torch.randn(2, 1, 5, 8)
    with caplog.at_level(logging.WARNING):
        PaddingRecord().begin(x[:1].expand(2, -1, -1, -1))
        known = PaddingRecord()
        known.receive(MASK[:2], 0)
        known.begin(x)
        assert not caplog.records
        PaddingRecord().begin(x)
        PaddingRecord().begin(x)
    assert [record.getMessage() for record in caplog.records] == [
        "the cache does not see the attention mask: left-padded rows of this batch, if any, lose their sinks, which "
        "costs accuracy. Call enable_fused_attention(model), or register_position_hooks(model), before the first prompt"
    ]
