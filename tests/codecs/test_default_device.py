"""Codecs do not depend on PyTorch's default device, which users set to their GPU."""

from dataclasses import astuple

import pytest
import torch
from support.kernels.attention_cases import DECLARED, PAIRS
from support.method_cases import half_layout, make_codec, random_track

NAMES = ("trellis", "uniform", "prod-1", "centred-fractional", "kivi-2-4", *DECLARED)
SIDES = {f"{name}-{side}": (PAIRS[name][side == "values"], side) for name in NAMES for side in ("keys", "values")}


@pytest.mark.parametrize("name", SIDES)
def test_codes_and_tables_are_the_same_under_another_default_device(name: str) -> None:
    """Whatever is made on the default device has no numbers here, and fails as soon as it meets what has."""
    (method, options), side = SIDES[name]
    dim = 64
    options = options(dim) if callable(options) else options
    x = torch.randn(1, 2, 64, dim)
    group = make_codec(method, dim, side, heads=2, layer=2, **options).group
    rope = random_track(half_layout(dim), 1, 64, stride=group).read(0, 64)
    made = []
    for device in ("meta", "cpu"):  # what is cached is made in the first
        with torch.device(device):
            codec = make_codec(method, dim, side, heads=2, layer=2, **options)
            codec.prepare(x)
            fields = codec.encode(x, rope if codec.rope_use(codec.options, side) == "factors" else None)
            kernel = codec.kernel_side
        tables = [y for y in astuple(kernel) if isinstance(y, torch.Tensor)] if kernel is not None else []
        made.append([*fields, *tables])
    for ours, theirs in zip(*made, strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, theirs)
