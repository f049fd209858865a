"""TurboQuant's parts: centring, channel sets, seeds and storage."""

from typing import Any

import pytest
import torch
from support.method_cases import bits_per_number, make_codec

from kvcache_compress.methods.turboquant.codec import channel_sets


def keys_with_a_mean(share: float, dim: int = 64, heads: int = 2) -> torch.Tensor:
    """Keys `[2, heads, 300, dim]` whose mean holds `share` of their energy."""
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(1, heads, 1, dim, generator=generator)
    mean = mean / mean.norm(dim=-1, keepdim=True) * (share * dim) ** 0.5
    return mean + (1 - share) ** 0.5 * torch.randn(2, heads, 300, dim, generator=generator)


def error(codec: Any, x: torch.Tensor) -> float:
    codec.prepare(x)
    return ((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("bits", [3, 2])
def test_centring(bits: float) -> None:
    """If the mean holds nine tenths of the energy, centring reduces the error to a tenth or less."""
    x = keys_with_a_mean(0.9)
    found = {c: error(make_codec("turboquant", 64, heads=2, bits=bits, center=c), x) for c in ("on", "off", "auto")}
    assert found["on"] < 0.12 * found["off"]
    assert found["auto"] == found["on"]


def test_auto_centring_is_per_head() -> None:
    x = torch.cat([keys_with_a_mean(0.9, heads=1), keys_with_a_mean(0.01, heads=1)], 1)
    codec = make_codec("turboquant", 64, heads=2, bits=3)
    codec.prepare(x)
    assert codec.mean[0].norm() > 1
    assert torch.equal(codec.mean[1], torch.zeros(64))


@pytest.mark.parametrize(
    ("bits", "dim", "fraction", "expected"),
    [
        (4, 128, 0.5, ((128, 4),)),
        (2.5, 128, 0.25, ((32, 3), (96, 2))),
        (3.5, 128, 0.5, ((64, 4), (64, 3))),
        (2.5, 64, 0.25, ((16, 3), (48, 2))),
        (1.5, 80, 0.5, ((40, 2), (40, 1))),
        (5.5, 16, 0.01, ((8, 6), (8, 5))),
        (5.5, 64, 0.99, ((56, 6), (8, 5))),
    ],
)
def test_channel_sets(bits: float, dim: int, fraction: float, expected: tuple[tuple[int, int], ...]) -> None:
    assert channel_sets(bits, dim, fraction) == expected


def test_outliers_get_the_bit_more() -> None:
    x = torch.randn(1, 2, 400, 64, generator=torch.Generator().manual_seed(6))
    loud = torch.tensor([[3, 9, 17, 20, 33, 40, 41, 63], [0, 1, 2, 3, 4, 5, 6, 7]])
    for head in range(2):
        x[:, head, :, loud[head]] *= 6
    options = {"heads": 2, "bits": 2.5, "outlier_fraction": 0.125, "center": "off"}
    codec = make_codec("turboquant", 64, **options)
    codec.prepare(x)
    outlier_rows = codec.basis[:, : codec.sets[0][0]]
    for head in range(2):
        assert outlier_rows[head].abs().sum(0).nonzero().flatten().tolist() == loud[head].tolist()
    assert error(make_codec("turboquant", 64, **options), x) < 0.6 * error(
        make_codec("turboquant", 64, heads=2, bits=2, center="off"), x
    )
    rows = codec.basis
    torch.testing.assert_close(rows @ rows.mT, torch.eye(64).expand(2, -1, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dim", "options", "bits"),
    [
        (64, {"bits": 4}, 4.25),
        (128, {"bits": 3}, 3.125),
        (80, {"bits": 2}, 2.2),
        (128, {"bits": 2.5, "outlier_fraction": 0.25}, 2.25 + 32 / 128),
        (64, {"bits": 3.5}, 3.5 + 32 / 64),
        (128, {"bits": 3, "estimator": "prod"}, 3 + 32 / 128),
        (128, {"bits": 1, "estimator": "prod"}, 1 + 16 / 128),
        (64, {"bits": 2.5, "estimator": "prod"}, 2.5 + 64 / 64),
    ],
)
def test_bits_per_number(dim: int, options: dict[str, Any], bits: float) -> None:
    """Codes and 16-bit scalars by hand, the layout's count, and the bytes really produced."""
    codec = make_codec("turboquant", dim, **options)
    assert bits_per_number(codec) == pytest.approx(bits)
    x = torch.randn(2, 1, 24, dim)
    codec.prepare(x)
    assert 8 * sum(field.nbytes for field in codec.encode(x)) / x.numel() == pytest.approx(bits)


def test_seeds() -> None:
    """Same seed, same codes; another seed, side or layer, another rotation - unless it is shared."""
    x = torch.randn(1, 1, 20, 64)
    assert torch.equal(
        make_codec("turboquant", 64, seed=3).encode(x)[0], make_codec("turboquant", 64, seed=3).encode(x)[0]
    )
    bases = [make_codec("turboquant", 64, side, seed=s).basis for side in ("keys", "values") for s in (0, 8)]
    assert all(not torch.equal(a, b) for i, a in enumerate(bases) for b in bases[:i])
    shared = [make_codec("turboquant", 64, side, shared_rotation=True).basis for side in ("keys", "values")]
    assert torch.equal(*shared)
