"""Vectors and codecs for tests of encoders in Triton and C++, and assertions that fields are equal."""

from typing import Any

import torch

from kvcache_compress.codecs.base import Codec, Fields
from kvcache_compress.codecs.quantizers.scalar import boundaries
from kvcache_compress.modeling.rope import Rope
from support.method_cases import declared_list


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


def assert_equal_but_for_ties(codec: Codec, ours: Fields, theirs: Fields, rope: Rope | None = None) -> None:
    """Assert equal fields except for ties: rotations that sum in another order may change one code in a thousand.

    Such a number lies on a boundary between two levels, so that neither code is worse by more than rounding.
    """
    different = total = 0
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (yours.shape, yours.dtype)
        if mine.dtype != torch.float16:
            different += int((mine != yours).sum())
            total += mine.numel()
    assert different <= total // 1000, f"{different} of {total} words"
    decoded, expected = codec.decode(ours, rope), codec.decode(theirs, rope)
    same = (decoded - expected).norm(dim=-1) <= 2e-3 * expected.norm(dim=-1)
    assert (~same).sum() <= different


def unit_vectors(width: int, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors `[2, 1, 9, width]` and norms, with ties between levels and a zero vector among them."""
    x = torch.randn(2, 1, 9, width, generator=torch.Generator(torch.get_default_device()).manual_seed(width))
    norm = x.norm(dim=-1)
    z = x / norm[..., None]
    bounds = boundaries(levels)
    z[0, 0, 0] = bounds[torch.arange(width) % len(bounds)]
    z[1, 0, 3], norm[1, 0, 3] = 0.0, 0.0
    return z, norm


CODECS: list[tuple[str, dict[str, Any]]] = [
    ("turboquant", {"bits": 4}),
    ("turboquant", {"bits": 3, "codebook": "uniform"}),
    ("turboquant", {"bits": 2.5, "codebook": "lloyd_max", "scalar": "norm"}),
    ("turboquant", {"bits": 3.5, "codebook": "lloyd_max", "outlier_fraction": 0.25}),
    ("turboquant", {"bits": 3, "estimator": "prod"}),
    ("turboquant", {"bits": 2}),
    ("turboquant", {"bits": 3.5, "outlier_fraction": 0.25}),
    ("turboquant", {"bits": 2.5, "estimator": "prod", "sketch": "gaussian"}),
    ("kivi", {"bits": 2}),
    ("kivi", {"bits": 3, "group_size": 16}),
    ("none", {}),
    *(entry[:2] for entry in declared_list("ENCODERS") if len(entry) == 2),
]
SIDES = [(*codec, side) for codec in CODECS for side in ("keys", "values")]
SIDES += [entry for entry in declared_list("ENCODERS") if len(entry) == 3]
