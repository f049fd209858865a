"""PolarQuant on RoPE pairs: cells, pairs and scores."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.method_cases import make_codec
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig

from kvcache_compress.codecs.quantizers.polar_pairs import radii
from kvcache_compress.modeling.rope import RopeLayout, rope_layout

NAME = "polarquant_rope"
PAPER = {"radius_scale": "channel", "reconstruction": "edge", "center": "off"}


def _side(**options: Any) -> dict[str, Any]:
    return {"method": NAME, **options}


CONTRACT = {
    "polarquant-rope": {"keys": _side(group_size=32), "values": {"method": "turboquant", "bits": 4}},
    "polarquant-rope-paper": {"keys": _side(radius_bits=2, **PAPER), "values": "none"},
}
_NONE: tuple[str, dict[str, Any]] = ("none", {})
KERNEL_PAIRS: dict[str, Any] = {
    "polarquant-rope": ((NAME, {}), ("turboquant", {"bits": 4})),
    "polarquant-rope-m6n3": ((NAME, {"angle_bits": 6, "radius_bits": 3, "group_size": 32}), _NONE),
    "polarquant-rope-paper": ((NAME, {"angle_bits": 3, "radius_bits": 6, "scalar": "match", **PAPER}), _NONE),
}
ENCODERS = [
    (NAME, {"group_size": 32}, "keys"),
    (NAME, {"angle_bits": 6, "radius_bits": 3, "group_size": 32, "scalar": "match"}, "keys"),
    (NAME, {"angle_bits": 3, "radius_bits": 5, **PAPER}, "keys"),
    (NAME, {"angle_bits": 2, "radius_bits": 6, "group_size": 32, "radius_scale": "channel", "scalar": "match"}, "keys"),
]


def polar(radius: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Keys `[..., 2 * pairs]`, pairs (i, i + pairs), of radii and angles `[..., pairs]`."""
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)


def test_radii_are_rounded_correctly() -> None:
    """Radii are rounded as in IEEE 754 on every processor, as in the kernels and C++: the longest is a boundary."""
    x, y = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    square = (x * x + y * y).numpy()
    assert np.array_equal(radii(x, y).numpy(), np.sqrt(square))


def error(codec: Any, x: torch.Tensor) -> float:
    codec.prepare(x)
    return ((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_papers_formulas(bits: int) -> None:
    """Section 3.2 written out: floor(r / s) with s = max r / (2^n - 1), floor(2^(m-1) θ / π) mod 2^m, lower edges."""
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(bits)) + 0.5
    codec = make_codec(NAME, 32, heads=2, angle_bits=bits, radius_bits=8 - bits, **PAPER)
    codec.prepare(x)
    a, b = x.double().chunk(2, -1)
    radius, theta = (a**2 + b**2).sqrt(), torch.atan2(b, a)
    steps = radius / (radius.amax(2, keepdim=True) / (2 ** (8 - bits) - 1))
    turns = 2 ** (bits - 1) * theta / math.pi
    inside = ((steps % 1 - 0.5).abs() < 0.4999) & ((turns % 1 - 0.5).abs() < 0.4999)
    r = steps.floor() * radius.amax(2, keepdim=True) / (2 ** (8 - bits) - 1)
    phi = math.pi / 2 ** (bits - 1) * turns.floor().remainder(2**bits)
    ours = torch.stack(codec.decode(codec.encode(x)).chunk(2, -1))
    expected = torch.stack([r * phi.cos(), r * phi.sin()]).float()
    torch.testing.assert_close(ours[:, inside], expected[:, inside], atol=1e-4, rtol=1e-5)
    assert inside.float().mean() > 0.97


def test_cells_by_hand() -> None:
    """Radii and angles in the middle of their cells come back exactly, also with an angle a full turn larger."""
    m, n, pairs = 3, 2, 8
    generator = torch.Generator().manual_seed(0)
    angle_codes = torch.randint(0, 2**m, (1, 1, 32, pairs), generator=generator)
    radius_codes = torch.randint(0, 2**n, (1, 1, 32, pairs), generator=generator)
    x = polar(2.0 * (radius_codes + 0.5), 2 * math.pi * (angle_codes - 4 + 0.5) / 2**m)
    x[0, 0, 0, 0], x[0, 0, 0, 8] = 8.0, 0.0
    x[:, :, 0, 1:8], x[:, :, 0, 9:] = 0.0, 8.0
    codec = make_codec(NAME, 16, angle_bits=m, radius_bits=n, group_size=32)
    decoded = codec.decode(codec.encode(x))
    torch.testing.assert_close(decoded[:, :, 1:], x[:, :, 1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_angles_wrap(bits: int) -> None:
    """No angle is off by more than half a cell, -π, π and both sides of zero included."""
    theta = torch.linspace(-math.pi, math.pi, 64 * 32).view(1, 1, 64, 32)
    theta[0, 0, 0, :4] = torch.tensor([0.0, -0.0, 1e-7, -1e-7])
    theta[0, 0, 1, :2] = torch.tensor([math.pi, -math.pi])
    codec = make_codec(NAME, 64, angle_bits=bits, radius_bits=6)
    real, imaginary = codec.decode(codec.encode(polar(torch.ones(()), theta))).chunk(2, -1)
    off = (torch.atan2(imaginary, real) - theta + math.pi).remainder(2 * math.pi) - math.pi
    assert off.abs().max() <= math.pi / 2**bits * 1.0001
    assert off.abs().max() > math.pi / 2**bits * 0.9


def test_later_radii() -> None:
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    channel, group = make_codec(NAME, 64, radius_scale="channel"), make_codec(NAME, 64)
    for codec in (channel, group):
        codec.prepare(x)
    decoded = channel.decode(channel.encode(4 * x))
    top = torch.hypot(*x.chunk(2, -1)).amax(2, keepdim=True)
    assert (torch.hypot(*decoded.chunk(2, -1)) <= top).all()
    torch.testing.assert_close(
        group.decode(group.encode(4 * x)), 4 * group.decode(group.encode(x)), atol=0.02, rtol=0.01
    )


def test_match() -> None:
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    codec = make_codec(NAME, 64, heads=2, radius_bits=2, reconstruction="edge", scalar="match")
    torch.testing.assert_close(codec.decode(codec.encode(x)).norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)


LAYOUTS: dict[str, Any] = {
    "half": LlamaConfig(hidden_size=128, num_attention_heads=2),
    "interleaved": CohereConfig(hidden_size=128, num_attention_heads=2),
    "partial": GPTNeoXConfig(hidden_size=128, num_attention_heads=2, rotary_pct=0.25),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_are_the_models_own(name: str) -> None:
    layout = rope_layout(LAYOUTS[name], 64)
    assert layout is not None
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    pairs = {"half": (1, 33), "interleaved": (2, 3), "partial": (1, 9)}[name]
    assert any((layout.order[j], layout.order[j + 32]) == pairs for j in range(32))
    codec = make_codec(NAME, 64, heads=2, rope=layout)
    fields, decoded = codec.encode(x), codec.decode(codec.encode(x))
    turned = layout.rotate(x, (torch.zeros(1, 64, layout.rotary), torch.ones(1, 64, layout.rotary)))
    turned_fields, turned_decoded = codec.encode(turned), codec.decode(codec.encode(turned))
    assert torch.equal(fields[1], turned_fields[1]), "radii"
    assert (fields[0] != turned_fields[0]).any(), "angles"
    by_hand = layout.rotate(decoded, (torch.zeros(1, 64, layout.rotary), torch.ones(1, 64, layout.rotary)))
    torch.testing.assert_close(turned_decoded, by_hand, atol=1e-4, rtol=1e-4)
    query = torch.randn(1, 2, 5, 64)
    torch.testing.assert_close(codec.score(codec.map_query(query), fields), query @ decoded.mT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", ["channel", "group"])
def test_zero_and_huge_keys(scale: str) -> None:
    for x in (torch.zeros(1, 1, 64, 64), 1e6 * torch.randn(1, 1, 64, 64)):
        codec = make_codec(NAME, 64, radius_scale=scale, scalar="match")
        codec.prepare(x)
        assert codec.decode(codec.encode(x)).isfinite().all()


def test_layouts_index_outside_of_inference_mode_too() -> None:
    """Indices of a layout that were created under inference mode can be used with gradients later."""
    layout = RopeLayout((0, 3, 1, 2), 2, (0, 1))
    with torch.inference_mode():
        layout.join(*layout.split(torch.ones(1, 4)))
    x = torch.randn(5, 4, requires_grad=True)
    back = layout.join(*layout.split(x))
    assert torch.equal(back, x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 4))
