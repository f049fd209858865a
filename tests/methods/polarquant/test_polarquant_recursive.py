"""Recursive PolarQuant: pairing, the circle, packing, 8-bit radii, and the paper's error (Lemma 2)."""

import math
from typing import Any

import pytest
import torch
from support.method_cases import make_codec, unit_vectors

from kvcache_compress.codecs.quantizers import polar_tree
from kvcache_compress.methods.polarquant.codebooks import (
    angle_density,
    make_codebook,
    offline_codebook,
    online_codebook,
)

NAME = "polarquant_recursive"


def polar(**options: Any) -> tuple[str, dict[str, Any]]:
    return NAME, options


PAPER = {"levels": 4, "bits": (4, 2), "radius_bits": 16, "scalar": "norm", "shared_rotation": True}
CONTRACT = {
    "polar": {side: {"method": NAME, "bits": [4, 3, 2]} for side in ("keys", "values")},
    "polar-centred": {
        "keys": {"method": NAME, "bits": [4, 2], "center": "on", "radius_bits": 16},
        "values": {"method": NAME, "bits": [4, 2], "levels": 4, "precondition": False},
    },
}
KERNEL_PAIRS = {
    "polar-4-3-2": (polar(), polar()),
    "polar-centred-online": (polar(center="on", codebook="online", bits=(4, 2)), polar(codebook="online", bits=(4, 2))),
    "polar-paper": (polar(**PAPER), polar(**(PAPER | {"precondition": False, "codebook": "online"}))),
    "polar-other-bits": (polar(levels=3, bits=(5, 3, 1)), polar(levels=2, bits=(6, 3), radius_bits=16)),
    "polar-turboquant": (polar(bits=(3,)), ("turboquant", {"bits": 3})),
}
ENCODERS = [
    polar(),
    polar(bits=(4, 2), codebook="online"),
    polar(**PAPER),
    polar(levels=4, bits=(6, 5, 3, 1), scalar="norm"),
    polar(levels=2, bits=(3,), radius_bits=16, precondition=False),
]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dim", "levels"), [(32, 5), (64, 4), (80, 4), (96, 3), (112, 1)])
def test_pairs_are_neighbours_in_blocks(dim: int, levels: int) -> None:
    """Level ℓ joins the norms of two neighbouring runs of 2^(ℓ-1) channels (Definition 1)."""
    x = gaussian(3, dim)
    found = polar_tree.angles(x[:, polar_tree.adjacent_order(dim, levels)], levels)
    for level, angles in enumerate(found, 1):
        halves = x.unflatten(-1, (-1, 2, 2 ** (level - 1)))
        low, high = (halves[..., 0, 0], halves[..., 1, 0]) if level == 1 else halves.norm(dim=-1).unbind(-1)
        expected = torch.atan2(high, low)
        if level == 1:
            expected = expected.remainder(2 * math.pi)
        torch.testing.assert_close(angles.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize(
    ("dim", "bits"),
    [(32, (2,)), (64, (4, 3, 2)), (80, (3,)), (96, (6, 5, 4, 1)), (112, (4, 3, 2)), (256, (6, 5, 4, 1))],
)
def test_codes_come_back(dim: int, bits: tuple[int, ...]) -> None:
    levels = (dim & -dim).bit_length() - 1
    tree = polar_tree.polar_tree(dim, (bits + bits[-1:] * levels)[:levels])
    generator = torch.Generator().manual_seed(dim)
    codes = [torch.randint(2**level.bits, (2, 3, level.count), generator=generator) for level in tree.levels]
    fields = polar_tree.pack(tree, codes)
    assert [(field.dtype, field.shape[2:]) for field in fields] == [
        (field.dtype, field.shape) for field in tree.fields(torch.float16)[:-1]
    ]
    assert all(torch.equal(a, b) for a, b in zip(polar_tree.unpack(tree, fields), codes, strict=True))


@pytest.mark.parametrize(("bits", "shift"), [(1, 0.0), (1, 3.0), (2, 0.2), (4, -0.2), (4, 0.01)])
def test_circle(bits: int, shift: float) -> None:
    """The code of an angle is the nearest one around the circle, for any rotation of the codebook."""
    even = 2 * math.pi * torch.arange(2**bits).double() / 2**bits
    book = make_codebook(even + shift + 0.05 * (even * 3).sin(), circular=True)
    angles = torch.linspace(0, 2 * math.pi, 4001).double()[:-1]
    codes = polar_tree.circle_codes(angles.cos().float(), angles.sin().float(), book)
    away = (angles[:, None] - book.angles + math.pi).remainder(2 * math.pi) - math.pi
    chosen = away.abs().gather(1, codes[:, None])[:, 0]
    torch.testing.assert_close(chosen, away.abs().amin(1), atol=1e-6, rtol=0)


def test_quantizing_takes_the_nearest_angle() -> None:
    y = gaussian(50, 64)
    books = tuple(offline_codebook(level, 3) for level in range(1, 7))
    tree = polar_tree.polar_tree(64, (3,) * 6)
    planes, energy, cross = polar_tree.encode(y, tree, books)
    codes = polar_tree.unpack(tree, planes)
    for index, (code, angles) in enumerate(zip(codes, polar_tree.angles(y, 6), strict=True)):
        away = (angles[..., None].double() - books[index].angles).abs()
        if index == 0:
            away = torch.minimum(away, 2 * math.pi - away)
        torch.testing.assert_close(away.gather(-1, code[..., None])[..., 0], away.amin(-1), atol=1e-6, rtol=0)
    point = polar_tree.expand(codes, torch.ones(50, 1), books)
    torch.testing.assert_close(energy.sqrt(), y.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(cross, (y * point).sum(-1, keepdim=True))
    torch.testing.assert_close(point.norm(dim=-1), torch.ones(50), atol=1e-3, rtol=0)


def test_online_codebooks() -> None:
    """Deterministic by seed; they find clusters, also one across the wrap, and cope with few distinct angles."""
    clusters = torch.tensor([0.0, 1.0, 2.5, 4.0]).double()
    angles = (clusters[:, None] + 0.02 * gaussian(4, 500).double()).flatten().remainder(2 * math.pi)
    book = online_codebook(angles, 2, circular=True, seed=3)
    away = (book.angles[:, None] - clusters + math.pi).remainder(2 * math.pi) - math.pi
    assert away.abs().amin(0).max() < 0.01
    assert torch.equal(online_codebook(angles, 2, circular=True, seed=3).points, book.points)
    assert online_codebook(torch.tensor([0.3, 0.3, 0.4]), 3, circular=False, seed=0).points.isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_8_bit_radii(scale: float) -> None:
    """8-bit radii are within half a logarithmic step of 16-bit ones, also for later tokens of very different length."""
    x = gaussian(1, 2, 300, 64) * scale * torch.linspace(0.5, 4, 300)[:, None]
    coarse, fine = (make_codec(NAME, 64, heads=2, scalar="norm", center="off", radius_bits=b) for b in (8, 16))
    coarse.prepare(x)
    later = torch.cat([x, 0.02 * x, 8 * x], 2)
    radii = [codec._radii(codec.encode(later)[-1]) for codec in (coarse, fine)]
    step = (math.log2(8 * 3) + 6 + 4) / 254
    assert ((radii[0] / radii[1]).log2().abs() < step / 2 * 1.5 + 0.002).all()
    zero = torch.zeros(1, 2, 1, 64)
    assert torch.equal(coarse.decode(coarse.encode(zero)), zero)
    assert float(coarse.decode(coarse.encode(x * 1e-4)).abs().max()) == 0, "never longer than they are"
    huge = coarse.decode(coarse.encode(x * 1e4))
    assert huge.isfinite().all()


@pytest.mark.parametrize(("level", "bits"), [(1, 2), (2, 1), (2, 4), (4, 2), (7, 4)])
def test_codebooks_are_centroids(level: int, bits: int) -> None:
    """Each angle is the mean of its cell (equation 4); deeper levels are symmetric about π/4."""
    book = offline_codebook(level, bits)
    if level == 1:
        torch.testing.assert_close(book.angles.diff(), torch.full((2**bits - 1,), 2 * math.pi / 2**bits).double())
        return
    grid = torch.linspace(0, math.pi / 2, 200_001, dtype=torch.float64)
    weights = angle_density(level, grid)
    cells = torch.bucketize(grid, (book.angles[1:] + book.angles[:-1]) / 2)
    mass = torch.zeros_like(book.angles).index_add(0, cells, weights)
    means = torch.zeros_like(book.angles).index_add(0, cells, weights * grid) / mass
    torch.testing.assert_close(book.angles, means, atol=1e-5, rtol=0)
    torch.testing.assert_close(book.angles + book.angles.flip(0), torch.full_like(book.angles, math.pi / 2))


TABLE = [
    ({"levels": 4, "bits": (4, 2), "radius_bits": 16}, 0.0320),
    ({"bits": (4, 2), "radius_bits": 16}, 0.0351),
    ({"bits": (4, 3, 2), "radius_bits": 16}, 0.0279),
    ({"bits": (4, 2), "radius_bits": 8}, 0.0351),
    ({"bits": (4, 3, 2), "radius_bits": 8}, 0.0279),
]
"""Relative squared error at d = 128, from a simulation that shares no code."""


@pytest.mark.parametrize(("options", "expected"), TABLE, ids=str)
def test_distortion(options: dict[str, Any], expected: float) -> None:
    """Errors are within 2 % of the simulation; 8-bit radii add hardly any."""
    codec = make_codec(NAME, 128, scalar="norm", center="off", **options)
    x = unit_vectors(2000, 128)
    codec.prepare(x)
    assert (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item() == pytest.approx(expected, rel=0.02)


def test_online_codebooks_come_near_offline_ones() -> None:
    """After a rotation k-means finds the same codebooks, at most a few per cent worse."""
    x = unit_vectors(2000, 128)
    options = {"bits": (4, 2), "scalar": "norm", "center": "off"}
    errors = {}
    for codebook in ("offline", "online"):
        codec = make_codec(NAME, 128, codebook=codebook, **options)
        codec.prepare(x)
        errors[codebook] = (codec.decode(codec.encode(x)) - x).square().sum(-1).mean().item()
    assert errors["offline"] * 0.99 < errors["online"] < errors["offline"] * 1.05
