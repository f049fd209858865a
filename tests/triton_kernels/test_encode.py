"""The encode kernels against their torch twins: codes to the bit, stored scalars to one unit in the last place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from method_cases import declared_list, half_layout, random_track

from kvcache_compress import scalar
from kvcache_compress.codec import Codec, Fields
from kvcache_compress.lloyd_max import boundaries, lloyd_max_levels, uniform_levels
from kvcache_compress.methods import kivi
from kvcache_compress.triton_kernels.kivi import quantize as kivi_kernel
from kvcache_compress.triton_kernels.turboquant import quantize as turboquant_kernel


def last_places(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Largest difference of two positive float16 tensors in units in the last place."""
    return int((ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs().max())


def assert_equal_fields(ours: Fields, theirs: Fields) -> None:
    assert len(ours) == len(theirs)
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine.shape == yours.shape
        assert mine.dtype == yours.dtype
        if mine.dtype == torch.float16:
            assert mine.isfinite().all()
            assert last_places(mine, yours) <= 1
        else:
            assert torch.equal(mine, yours)


def unit_vectors(width: int, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions `[2, 1, 9, width]` and norms; among them ties between levels and a zero vector."""
    x = torch.randn(2, 1, 9, width, generator=torch.Generator(torch.get_default_device()).manual_seed(width))
    norm = x.norm(dim=-1)
    z = x / norm[..., None]
    bounds = boundaries(levels)
    z[0, 0, 0] = bounds[torch.arange(width) % len(bounds)]
    z[1, 0, 3], norm[1, 0, 3] = 0.0, 0.0
    return z, norm


@pytest.mark.parametrize("bits", range(1, 7))
@pytest.mark.parametrize("width", [8, 48, 72, 80, 96, 128, 256])
def test_turboquant_codes(bits: int, width: int) -> None:
    levels = lloyd_max_levels(width, bits).float() if width % 16 else uniform_levels(width, bits).float()
    z, norm = unit_vectors(width, levels)
    expected = scalar.quantize(z, norm, levels, bits, "norm")
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, "norm"), expected)


@pytest.mark.parametrize("kind", get_args(scalar.Scalar))
@pytest.mark.parametrize(("width", "bits"), [(8, 3), (16, 1), (48, 2), (64, 4), (80, 5), (128, 6), (256, 4)])
def test_turboquant_scalars(kind: scalar.Scalar, width: int, bits: int) -> None:
    levels = lloyd_max_levels(width, bits).float()
    z, norm = unit_vectors(width, levels)
    z[0, 0, 0] = -z[0, 0, 1]
    norm[0, 0, 1] = 1e6
    expected = scalar.quantize(z, norm, levels, bits, kind)
    assert_equal_fields(turboquant_kernel(z, norm, levels, bits, kind), expected)


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


CODECS: list[tuple[str, dict[str, Any]]] = [
    ("turboquant", {"bits": 4}),
    ("turboquant", {"bits": 3, "codebook": "uniform", "rotation": "haar"}),
    ("turboquant", {"bits": 2.5, "scalar": "least_squares"}),
    ("turboquant", {"bits": 3.5, "outlier_fraction": 0.25}),
    ("turboquant", {"bits": 3, "estimator": "prod"}),
    ("turboquant", {"bits": 2.5, "estimator": "prod", "sketch": "gaussian"}),
    ("kivi", {"bits": 2}),
    ("kivi", {"bits": 3, "group_size": 16}),
    ("none", {}),
    *(entry[:2] for entry in declared_list("ENCODERS") if len(entry) == 2),
]
SIDES = [(*codec, side) for codec in CODECS for side in ("keys", "values")]
SIDES += [entry for entry in declared_list("ENCODERS") if len(entry) == 3]


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize(("method", "options", "side"), SIDES)
def test_codecs_encode_alike_on_both_backends(
    method: str, options: dict[str, Any], side: Any, head_dim: int, make_codec: Callable[..., Codec]
) -> None:
    codec = make_codec(method, options, side, head_dim)
    x = torch.randn(2, 2, 64, head_dim, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    x[0, 1, 5] = 0.0
    codec.prepare(x)
    rope = random_track(half_layout(head_dim), 2, 64).read(16, 48)
    # A slice of a bigger tensor, as the layer hands its tail over.
    part = x[:, :, 16:48]
    assert_equal_fields(codec.encode(part, rope, "triton"), codec.encode(part, rope, "torch"))
