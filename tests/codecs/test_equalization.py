"""Equalization of outlier channels: its factors, and where it is off. Its gain: `tests/contract/test_statistics.py`."""

import pytest
import torch
from support.method_cases import make_codec

from kvcache_compress.codecs import linear
from kvcache_compress.codecs.transforms.equalization import channel_factors, channel_rms

HEADS, DIM = 2, 32


def states(factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[1, H, 512, D]` and queries `[1, 2 H, 512, D]`, two channels of head 0 times and divided by `factor`."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(1, heads, 512, DIM, generator=generator) for heads in (HEADS, 2 * HEADS))
    keys[:, 0, :, [3, 20]] *= factor
    queries[:, :2, :, [3, 20]] /= factor
    return keys, queries


def factors_of(
    keys: torch.Tensor, mean: torch.Tensor | None = None, queries: torch.Tensor | None = None
) -> torch.Tensor | None:
    return channel_factors(channel_rms(linear.centred(keys, mean)), keys.shape[0] * keys.shape[2], queries)


def test_even_channels_are_left_alone() -> None:
    keys, queries = states()
    assert factors_of(keys, None, queries) is None
    assert factors_of(0 * keys, None, queries) is None
    assert factors_of(keys[:, :, :20] * torch.linspace(0.01, 1, DIM), None, queries) is None


@pytest.mark.parametrize("factor", [16.0, 1 / 16])
def test_factors_undo_the_scale(factor: float) -> None:
    """The factor is the scale, up to the chance of 512 tokens; the mean of keys is left out, and so are other heads."""
    keys, queries = states(factor)
    mean = torch.full((HEADS, DIM), 50.0)
    factors = factors_of(keys + mean[:, None], mean, queries)
    assert factors is not None
    assert torch.allclose(factors[0, [3, 20]], torch.tensor(factor), rtol=0.2)
    factors[0, [3, 20]] = 1
    assert torch.equal(factors, torch.ones(HEADS, DIM))


def test_keys_alone() -> None:
    """Without queries, or with few, large keys get their size as a factor; small ones, which may not matter, none."""
    keys, queries = states(16.0)
    alone = factors_of(keys)
    assert alone is not None
    assert torch.allclose(alone[0, [3, 20]], torch.tensor(16.0), rtol=0.2)
    few = factors_of(keys, None, queries[:, :, :8])
    assert few is not None
    assert torch.equal(alone, few)
    assert factors_of(states(1 / 16)[0]) is None


def test_dead_channels() -> None:
    keys, queries = states(16.0)
    keys[:, 0, :, 5] = 0
    queries[:, :2, :, 6] = 0
    factors = factors_of(keys, None, queries)
    assert factors is not None
    assert factors[0, 5] == 1 / 256
    assert factors[0, 6] == 256


def test_off() -> None:
    """Values are not equalized, nor keys without dense sinks, nor where channels have a sketch of their own."""
    keys, queries = states(16.0)
    for made in (
        make_codec("turboquant", DIM, "values", heads=HEADS),
        make_codec("turboquant", DIM, heads=HEADS, sinks=0),
        make_codec("qjl", DIM, heads=HEADS, outlier_channels=4),
    ):
        assert not made.least_tokens()
        assert made.prepare(keys, may_wait=True)
        assert "factors" not in made.measure(keys, queries)
    with pytest.raises(ValueError, match="equalize='auto' for values of turboquant "):
        make_codec("turboquant", DIM, "values", equalize="auto")
