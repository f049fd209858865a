"""KIVI: groups, exactness on the grid, and the error bound."""

import pytest
import torch
from support.method_cases import make_codec


def grid(bits: int, shape: tuple[int, ...], axis: int) -> torch.Tensor:
    """Numbers `zero + scale * code` whose groups along `axis` hold both end codes; 16 bits hold scale and zero."""
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(bits))
    codes.select(axis, 0).fill_(0)
    codes.select(axis, 1).fill_(2**bits - 1)
    return codes * 0.25 - 3.5


@pytest.mark.parametrize("bits", range(1, 7))
def test_exact_on_the_grid(bits: int) -> None:
    """Numbers on the grid come back exactly; groups are 32 tokens of a channel (keys), or 32 channels of a token."""
    keys = grid(bits, (2, 3, 4, 32, 64), axis=3).flatten(2, 3)
    codec = make_codec("kivi", 64, "keys", bits=bits)
    assert torch.equal(codec.decode(codec.encode(keys)), keys)
    values = grid(bits, (2, 3, 50, 2, 32), axis=4).flatten(3, 4)
    codec = make_codec("kivi", 64, "values", bits=bits)
    assert torch.equal(codec.decode(codec.encode(values)), values)


def test_grouping() -> None:
    """A large channel of keys does not add error to other channels, nor a large token of values to other tokens."""
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    loud_channel, loud_token = x.clone(), x.clone()
    loud_channel[..., 5] *= 1000
    loud_token[:, :, 7] *= 1000
    keys, values = make_codec("kivi", 64, "keys", bits=4), make_codec("kivi", 64, "values", bits=4)
    others = torch.arange(64) != 5
    assert torch.equal(keys.decode(keys.encode(loud_channel))[..., others], keys.decode(keys.encode(x))[..., others])
    others = torch.arange(64) != 7
    got, plain = (values.decode(values.encode(y)) for y in (loud_token, x))
    assert torch.equal(got[:, :, others], plain[:, :, others])
    spoiled = values.decode(values.encode(loud_channel))
    assert (spoiled - loud_channel)[..., 6].abs().mean() > 10 * (plain - x)[..., 6].abs().mean(), "same group of 32"
    torch.testing.assert_close(spoiled[..., 32:], plain[..., 32:])


def test_groups_are_independent() -> None:
    x = torch.randn(1, 2, 96, 64)
    codec = make_codec("kivi", 64, "keys", heads=2, bits=2)
    assert codec.group == 32
    whole = codec.encode(x)
    parts = [codec.encode(part) for part in x.split(32, 2)]
    assert all(torch.equal(a, torch.cat(b, 2)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))


@pytest.mark.parametrize(("side", "group_size", "bits"), [("keys", 16, 2), ("values", 32, 4), ("keys", 64, 4)])
def test_error_bound(side: str, group_size: int, bits: int) -> None:
    """The error is at most half a step, plus 16-bit rounding of scale and zero point (at most a 2048th of each)."""
    x = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(1)) * 3 + 1
    codec = make_codec("kivi", 64, side, heads=2, bits=bits, group_size=group_size)
    fields = codec.encode(x)
    scale, zero = fields[-2].float(), fields[-1].float()
    axis = 2 if side == "keys" else 3
    bound = scale / 2 + (zero.abs() + (2**bits - 1) * scale) / 2048
    error = (codec.decode(fields) - x).abs()
    assert (error <= bound.repeat_interleave(group_size, axis) * 1.00001).all()
    assert error.max() > 0.4 * scale.min()


def test_constant_and_huge_groups() -> None:
    for side in ("keys", "values"):
        codec = make_codec("kivi", 64, side, bits=2)
        constant = torch.full((1, 1, 32, 64), 1.5)
        assert torch.equal(codec.decode(codec.encode(constant)), constant)
        huge = torch.randn(1, 1, 32, 64) * 1e6
        assert codec.decode(codec.encode(huge)).isfinite().all()
