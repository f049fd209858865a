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
