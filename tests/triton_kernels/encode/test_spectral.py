"""Spectral's encode kernel against torch: sizes, RoPE of every kind, statistics of a prompt, and keys of any range."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.files.spectral_files import statistics_file
from support.kernels.device import DEVICE
from support.kernels.encode_cases import assert_equal_but_for_ties
from support.kernels.segment_makers import make_codec
from support.method_cases import half_layout, neighbour_layout, random_track

from kvcache_compress.backends.choice import BACKENDS
from kvcache_compress.codecs.base import Codec
from kvcache_compress.modeling.rope import Rope, RopeLayout

Make = Callable[..., Codec]
TEXT = {"statistics": "text", "group": 32}


def factors(layout: RopeLayout, tokens: int, group: int) -> Rope:
    """cos and sin of the groups of two rows, the second at other positions."""
    return random_track(layout, 2, 16 + tokens, 16, group).read(0, tokens)


def check(codec: Codec, x: torch.Tensor, rope: Rope | None) -> None:
    ours, theirs = BACKENDS["triton"].encoded(codec, x, rope), codec.encode(x, rope)
    assert codec.kernel_encoder is not None
    assert_equal_but_for_ties(codec, ours, theirs, rope)


@pytest.mark.parametrize(
    ("head_dim", "bits", "group"),
    [(16, 4, 32), (24, 2, 32), (64, 0.5, 32), (64, 6, 64), (80, 1.2, 32), (128, 2, 128), (256, 3, 32)],
)
def test_sizes(head_dim: int, bits: float, group: int) -> None:
    codec = make_codec("spectral", {"bits": bits, "statistics": statistics_file(head_dim, group)}, "keys", head_dim)
    torch.manual_seed(head_dim)
    x = torch.randn(2, 2, group, head_dim).bfloat16()
    check(codec, x, factors(half_layout(head_dim), group, group))


@pytest.mark.parametrize("rotary", [4, 20])
def test_pairs_of_neighbours_of_which_some_rotate(rotary: int) -> None:
    layout = neighbour_layout(64, rotary)
    codec = make_codec("spectral", {"bits": 2, "statistics": statistics_file(64)}, "keys", 64, layout=layout)
    torch.manual_seed(rotary)
    cos, sin = factors(layout, 64, 32)
    check(codec, torch.randn(2, 2, 64, 64), (1.3 * cos, 1.3 * sin))  # YaRN's factors are longer than 1


def test_without_rope() -> None:
    codec: Any = make_codec("spectral", TEXT, "keys", 64)
    codec.context = replace(codec.context, rope=None)
    torch.manual_seed(0)
    x = torch.randn(2, 2, 64, 64)
    codec.prepare(x)
    check(codec, x, None)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0])
def test_statistics_of_a_prompt_in_any_range(scale: float) -> None:
    """Channels of ranges from 1 to 300, one with a mean fifty times its deviation; new statistics make new tables.

    Larger keys could not be packed.
    """
    codec = make_codec("spectral", {**TEXT, "bits": 3}, "keys", 64)
    torch.manual_seed(0)
    rope = factors(half_layout(64), 64, 32)
    for seed in range(2):
        ranges = torch.logspace(0, 2.5, 64)[torch.randperm(64)]
        x = scale * ranges * torch.randn(2, 2, 256, 64, generator=torch.Generator(DEVICE).manual_seed(seed))
        x[..., 31] += 50 * scale * ranges[31]
        codec.prepare(x)
        check(codec, x[:, :, :64], rope)


def test_zeros_and_outliers() -> None:
    """A key whose channels are all zero, and one that is a thousand times as long as usual, are coded as in torch."""
    codec = make_codec("spectral", {**TEXT, "bits": 2}, "keys", 64)
    torch.manual_seed(0)
    x = torch.randn(2, 2, 64, 64)
    codec.prepare(x - x.mean((0, 2), keepdim=True))
    codec.means.zero_()  # type: ignore[attr-defined]
    x[0, 1, 5] = 0.0
    x[1, 0, 7] *= 1000
    rope = factors(half_layout(64), 64, 32)
    ours, theirs = BACKENDS["triton"].encoded(codec, x, rope), codec.encode(x, rope)
    assert_equal_but_for_ties(codec, ours, theirs, rope)
    for mine, yours in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(mine[0, 1, 5], yours[0, 1, 5])
    assert ours[-1].flatten(2)[0, 1, 5] == 0
