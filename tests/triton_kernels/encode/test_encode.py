"""The encode kernels against their torch twins: codes to the bit, stored scalars to one unit in the last place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support.device import DEVICE
from support.encode_cases import SIDES, assert_equal_but_for_ties, assert_equal_fields, unit_vectors
from support.method_cases import half_layout, random_track

from kvcache_compress.codecs import packing, scalar, trellis
from kvcache_compress.codecs.base import Codec
from kvcache_compress.codecs.layout import PLANES
from kvcache_compress.codecs.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.methods import kivi
from kvcache_compress.storage.side import encoded
from kvcache_compress.triton_kernels.encode.kivi import quantize as kivi_kernel
from kvcache_compress.triton_kernels.encode.turboquant import quantize as turboquant_kernel

ROTATED = {"turboquant", "qjl", "polarquant_recursive", "spectral"}
"""Methods whose kernels also rotate, with sums in another order than torch's."""


@pytest.mark.parametrize("bits", range(1, 7))
@pytest.mark.parametrize("width", [8, 48, 72, 80, 96, 128, 256])
def test_turboquant_codes(bits: int, width: int) -> None:
    levels = (lloyd_max_levels if width % 16 else uniform_levels)(width, bits).float().to(DEVICE)
    z, norm = unit_vectors(width, levels)
    expected = scalar.quantize(z, norm, levels, bits, "norm")
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, "norm"), expected)


@pytest.mark.parametrize("order", [torch.clone, outward], ids=["ascending", "outward"])
@pytest.mark.parametrize("kind", get_args(scalar.Scalar))
@pytest.mark.parametrize(("width", "bits"), [(8, 3), (16, 1), (48, 2), (64, 4), (80, 5), (128, 6), (256, 4)])
def test_turboquant_scalars(
    kind: scalar.Scalar, width: int, bits: int, order: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    levels = order(lloyd_max_levels(width, bits).float()).to(DEVICE)
    z, norm = unit_vectors(width, levels)
    z[0, 0, 0] = -z[0, 0, 1]
    norm[0, 0, 1] = 1e6
    expected = scalar.quantize(z, norm, levels, bits, kind)
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, kind), expected)


@pytest.mark.parametrize(("width", "bits"), [(8, 2), (16, 1), (24, 3), (48, 2), (64, 1), (72, 3), (128, 2), (160, 3)])
def test_trellis_codes(width: int, bits: int) -> None:
    levels = trellis.trellis_levels(width, bits).float().to(DEVICE)
    z, norm = unit_vectors(width, levels)
    z[1, 0, 4] = 0.0
    z[1, 0, 4, 5] = 1.0
    expected = trellis.quantize(z, norm, levels, bits, "norm")
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, "norm"), expected)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_trellis_codes_of_equal_paths(bits: int) -> None:
    """Paths of equal cost are many where numbers have few values, zeros and multiples of a level."""
    levels = trellis.trellis_levels(32, bits).float().to(DEVICE)
    places = torch.randint(len(levels) + 1, (24, 32), generator=torch.Generator(levels.device).manual_seed(bits))
    z = torch.cat([levels, levels.new_zeros(1)])[places]
    z[:8] = z[:8, :1]
    norm = torch.ones(24, device=z.device)
    expected = trellis.quantize(z, norm, levels, bits, "norm")
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, "norm"), expected)


@pytest.mark.parametrize("kind", get_args(scalar.Scalar))
def test_trellis_scalars(kind: scalar.Scalar) -> None:
    levels = trellis.trellis_levels(40, 2).float().to(DEVICE)
    z, norm = unit_vectors(40, levels)
    norm[0, 0, 1] = 1e6
    z[1, 0, 3, 0] = 1e-30
    expected = trellis.quantize(z, norm, levels, 2, kind)
    assert_equal_fields(turboquant_kernel(z, norm, levels, 2, kind), expected)


@pytest.mark.parametrize("head_dim", [64, 160])
def test_wide_trellis_codes_take_a_second_launch(head_dim: int, make_codec: Callable[..., Codec]) -> None:
    codec = make_codec("turboquant", {"bits": 2, "codebook": "trellis"}, "values", head_dim)
    assert (codec.kernel_encoder is None) == (head_dim == 160)
    x = torch.randn(1, 2, 3, head_dim, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    assert_equal_but_for_ties(codec, encoded(codec.on("triton"), x), codec.encode(x))


@pytest.mark.parametrize("bits", range(1, 7))
@pytest.mark.parametrize(("width", "tokens", "channels"), [(128, 32, 1), (80, 16, 1), (64, 1, 32), (96, 1, 16)])
def test_kivi_codes(bits: int, width: int, tokens: int, channels: int) -> None:
    x = torch.randn(2, 2, 64, width, generator=torch.Generator(torch.get_default_device()).manual_seed(bits))
    x[0, 0, :32, :32] = 3.0
    grouped = x.unflatten(2, (-1, tokens)) if tokens > 1 else x.unflatten(3, (-1, channels))
    axis = 3 if tokens > 1 else 4
    zero = grouped.amin(axis).half()
    scale = ((grouped.amax(axis) - grouped.amin(axis)) / (2**bits - 1)).half()
    expected = kivi.quantize(x, scale, zero, bits, tokens, channels)
    assert_equal_fields(kivi_kernel(x, scale, zero, bits, tokens, channels), expected)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize(("method", "options", "side"), SIDES)
def test_codecs_encode_alike_on_both_backends(
    method: str, options: dict[str, Any], side: Any, head_dim: int, make_codec: Callable[..., Codec]
) -> None:
    codec = make_codec(method, options, side, head_dim)
    x = torch.randn(2, 2, 64, head_dim, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    x[0, 1, 5] = 0.0
    codec.prepare(x)
    rope = random_track(half_layout(head_dim), 2, 64, 16, codec.group).read(0, 32)
    # A slice of a bigger tensor, as the tail of a layer is.
    part = x[:, :, 16:48]
    ours, theirs = encoded(codec.on("triton"), part, rope), codec.encode(part, rope)
    if method in ROTATED and codec.kernel_encoder is not None:
        assert_equal_but_for_ties(codec, ours, theirs, rope)
    else:
        assert_equal_fields(ours, theirs)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("bits", range(2, 7))
def test_angles_on_boundaries(bits: int, head_dim: int, make_codec: Callable[..., Codec]) -> None:
    """Axes and diagonals, with zeros of either sign, belong to the cell above."""
    codec = make_codec("polarquant_rope", {"angle_bits": bits, "center": "off", "group_size": 32}, "keys", head_dim)
    signs = torch.tensor([0.0, -0.0, 1.0, -1.0])
    real, imaginary = signs.repeat(4), signs.repeat_interleave(4)
    real = torch.where((real == 0) & (imaginary == 0), 0.0, real)  # zero vectors have no angle
    points = torch.cat([real.repeat(head_dim // 32), imaginary.repeat(head_dim // 32)])
    x = (torch.rand(1, 1, 32, 1).exp() * points).bfloat16()
    ours = encoded(codec.on("triton"), x)
    assert_equal_fields(ours, codec.encode(x))
    angle = torch.atan2(imaginary.double(), real.double()).remainder(2 * math.pi) / (2 * math.pi)
    cell = (angle * 2**bits + 1e-9).long().where(real.abs() + imaginary.abs() > 0, 0)
    codes = packing.unpack(ours[: len(PLANES[bits])], bits)
    assert (codes == cell.repeat(head_dim // 32)).all()


@pytest.mark.parametrize("scalar", ["none", "match"])
def test_pairs_that_take_several_turns(scalar: str, make_codec: Callable[..., Codec]) -> None:
    codec = make_codec("polarquant_rope", {"group_size": 128, "scalar": scalar, "center": "on"}, "keys", 160)
    x = 3 + torch.randn(1, 2, 256, 160)
    codec.prepare(x)
    assert_equal_fields(encoded(codec.on("triton"), x), codec.encode(x))
