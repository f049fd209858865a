"""Exchange of sinks and left padding, against loops over rows and tokens."""

import pytest
import torch

from kvcache_compress.codecs.mask import Mask
from kvcache_compress.codecs.padding import LeftPadding

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


def test_sinks_of_known_rows() -> None:
    """Rows without padding, with less and more than sinks, and with two tokens after it."""
    rows = padding(0, 2, 5, 8)
    stored = rows.exchange_(torch.arange(10).repeat(4, 1), SINKS)
    assert stored.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [4, 5, 2, 3, 0, 1, 6, 7, 8, 9],
        [5, 6, 7, 8, 4, 0, 1, 2, 3, 9],
        [8, 9, 2, 3, 4, 5, 6, 7, 0, 1],
    ]
    assert rows.exchange_(stored, SINKS).tolist() == torch.arange(10).repeat(4, 1).tolist()


@pytest.mark.parametrize("count", [1, 3, 7, 30])
def test_steps_store_what_one_prompt_does(count: int) -> None:
    """Tokens that arrive step by step end up where they would if all came at once."""
    rows, total = (0, 2, 5, 17, 28), 30
    made, x = padding(*rows), torch.randn(len(rows), 2, total, 8)
    sinks, others = x[:, :, :0], x[:, :, :0]
    for part in x.split(count, 2):
        start = sinks.shape[2] + others.shape[2]
        sinks, part = made.exchange_new(sinks, part, start, SINKS)
        new = min(SINKS - sinks.shape[2], part.shape[2])
        sinks, others = torch.cat([sinks, part[:, :, :new]], 2), torch.cat([others, part[:, :, new:]], 2)
    expected = torch.stack([one[:, order(n, total)] for n, one in zip(rows, x, strict=True)])
    assert torch.equal(torch.cat([sinks, others], 2), expected)
    assert torch.equal(made.exchange_(expected.mT, SINKS).mT, x)


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
