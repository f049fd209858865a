"""The encode kernels against their torch twins: codes to the bit, stored scalars to one unit in the last place."""

import math
from typing import Any, get_args

import pytest
import torch
import triton
import triton.language as tl
from support.kernels.device import DEVICE
from support.kernels.encode_cases import SIDES, assert_equal_but_for_ties, assert_equal_fields, unit_vectors
from support.kernels.segment_makers import make_codec
from support.method_cases import half_layout, neighbour_layout, random_track

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.codecs import packing
from kvcache_compress.codecs.layout import PLANES, padded_words
from kvcache_compress.codecs.quantizers import trellis
from kvcache_compress.codecs.quantizers.scalar import Scalar
from kvcache_compress.triton_kernels.encode.trellis import best_path

ROTATED = {"turboquant", "qjl", "polarquant_recursive", "spectral"}
"""Methods whose kernels also rotate, with sums in another order than torch's."""


KINDS = get_args(Scalar)


@pytest.mark.parametrize(
    ("head_dim", "bits", "kind", "order"),
    [
        (16, 1, "norm", "lloyd_max"), (24, 3, "unbiased", "uniform"), (48, 2, "match", "uniform"),
        (64, 4, "match", "lloyd_max"), (64, 4, "unbiased", "uniform"), (80, 5, "match", "lloyd_max"),
        (128, 6, "unbiased", "lloyd_max"), (256, 4, "norm", "uniform"),
    ],
)  # fmt: skip
def test_turboquant_codes(head_dim: int, bits: int, kind: Scalar, order: str) -> None:
    codec = make_codec("turboquant", {"bits": bits, "codebook": order, "scalar": kind}, "values", head_dim)
    x = torch.randn(2, 2, 9, head_dim, generator=torch.Generator(torch.get_default_device()).manual_seed(head_dim))
    x[0, 0, 1] *= 1e5
    x[1, 0, 3] = 0.0
    assert codec.kernel_encoder is not None
    ours = BACKENDS["triton"].encoded(codec, x)
    assert_equal_but_for_ties(codec, ours, codec.encode(x))
    assert not ours[-1][1, 0, 3].signbit(), "a zero vector's scalar is 0.0, not -0.0"


@triton.jit
def path_kernel(p_z, p_units, p_codes, p_index, BITS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr):
    """Best paths of 8 vectors of `8 * WORDS` numbers in memory order."""
    o_w = tl.arange(0, 8)[None, :, None] + 8 * tl.arange(0, PADDED)[None, None, :]
    o_z, m_z = tl.arange(0, 8)[:, None, None] * (8 * WORDS) + o_w, o_w < 8 * WORDS
    b_codes, b_index = best_path(tl.load(p_z + o_z, mask=m_z, other=0.0), p_units, BITS, WORDS, PADDED)
    tl.store(p_codes + o_z, b_codes, mask=m_z)
    tl.store(p_index + o_z, b_index, mask=m_z)


def assert_best_paths(z: torch.Tensor, levels: torch.Tensor, bits: int) -> None:
    """Paths of unit vectors `z` `[8, width]` are those of torch, to the bit."""
    width = z.shape[1]
    units = trellis.in_steps(levels, width)
    found = torch.empty(2, *z.shape, dtype=torch.int32, device=z.device)
    path_kernel[(1,)](z, units, *found, bits, width // 8, padded_words(width))
    for ours, theirs in zip(found, trellis.best_path(trellis.in_steps(z, width), units), strict=True):
        assert torch.equal(ours, theirs.int())


@pytest.mark.parametrize(("width", "bits"), [(8, 2), (16, 1), (24, 3), (72, 2), (128, 3)])
def test_trellis_codes(width: int, bits: int) -> None:
    levels = trellis.trellis_levels(width, bits).float().to(DEVICE)
    z = unit_vectors(width, levels)[0][:, 0, :4].reshape(8, width)
    z[1], z[2] = 0.0, 0.0
    z[2, 5] = 1.0
    assert_best_paths(z, levels, bits)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_trellis_codes_of_equal_paths(bits: int) -> None:
    """Paths of equal cost are many where numbers have few values, zeros and multiples of a level."""
    levels = trellis.trellis_levels(16, bits).float().to(DEVICE)
    places = torch.randint(len(levels) + 1, (16, 16), generator=torch.Generator(levels.device).manual_seed(bits))
    z = torch.cat([levels, levels.new_zeros(1)])[places]
    z[:8] = z[:8, :1]
    for part in z.split(8):
        assert_best_paths(part, levels, bits)


@pytest.mark.parametrize("kind", KINDS)
def test_trellis_scalars(kind: Scalar) -> None:
    codec = make_codec("turboquant", {"bits": 2, "codebook": "trellis", "scalar": kind}, "values", 24)
    x = torch.randn(1, 2, 9, 24, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    x[0, 0, 1] *= 1e5
    x[0, 1, 3] = 0.0
    assert_equal_but_for_ties(codec, BACKENDS["triton"].encoded(codec, x), codec.encode(x))


def test_torch_encodes_wide_trellis_codes() -> None:
    codec = make_codec("turboquant", {"bits": 2, "codebook": "trellis"}, "values", 160)
    assert codec.kernel_encoder is None
    x = torch.randn(1, 2, 3, 160, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    assert_equal_fields(BACKENDS["triton"].encoded(codec, x), codec.encode(x))


@pytest.mark.parametrize(
    ("method", "options", "side", "head_dim"), [(*case, (64, 96)[i // 2 % 2]) for i, case in enumerate(SIDES)]
)
def test_codecs_encode_alike_on_both_backends(method: str, options: dict[str, Any], side: Any, head_dim: int) -> None:
    codec = make_codec(method, options, side, head_dim)
    x = torch.randn(2, 2, 64, head_dim, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    x[0, 1, 5] = 0.0
    codec.prepare(x)
    count = codec.group if codec.group > 1 else 9
    rope = random_track(half_layout(head_dim), 2, 64, 16, codec.group).read(0, count)
    # A slice of a bigger tensor, as the tail of a layer is.
    part = x[:, :, 16 : 16 + count]
    ours, theirs = BACKENDS["triton"].encoded(codec, part, rope), codec.encode(part, rope)
    if method in ROTATED and codec.kernel_encoder is not None:
        assert_equal_but_for_ties(codec, ours, theirs, rope)
    else:
        assert_equal_fields(ours, theirs)


@pytest.mark.parametrize(("head_dim", "bits"), [(32, 2), (64, 3), (128, 4), (32, 5), (64, 6)])
def test_angles_on_boundaries(head_dim: int, bits: int) -> None:
    """Axes and diagonals, with zeros of either sign, belong to the cell above."""
    codec = make_codec("polarquant_rope", {"angle_bits": bits, "center": "off", "group_size": 32}, "keys", head_dim)
    signs = torch.tensor([0.0, -0.0, 1.0, -1.0])
    real, imaginary = signs.repeat(4), signs.repeat_interleave(4)
    real = torch.where((real == 0) & (imaginary == 0), 0.0, real)  # zero vectors have no angle
    points = torch.cat([real.repeat(head_dim // 32), imaginary.repeat(head_dim // 32)])
    x = (torch.rand(1, 1, 32, 1).exp() * points).bfloat16()
    ours = BACKENDS["triton"].encoded(codec, x)
    assert_equal_fields(ours, codec.encode(x))
    angle = torch.atan2(imaginary.double(), real.double()).remainder(2 * math.pi) / (2 * math.pi)
    cell = (angle * 2**bits + 1e-9).long().where(real.abs() + imaginary.abs() > 0, 0)
    codes = packing.unpack(ours[: len(PLANES[bits])], bits)
    assert (codes == cell.repeat(head_dim // 32)).all()


@pytest.mark.parametrize("scalar", ["none", "match"])
def test_pairs_that_take_several_turns(scalar: str) -> None:
    """The pairs are neighbours, and some of them do not rotate."""
    options = {"group_size": 128, "scalar": scalar, "center": "on"}
    codec = make_codec("polarquant_rope", options, "keys", 160, layout=neighbour_layout(160, 60))
    x = 3 + torch.randn(1, 2, 256, 160)
    codec.prepare(x)
    assert_equal_fields(BACKENDS["triton"].encoded(codec, x), codec.encode(x))
