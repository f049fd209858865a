"""Names in C++ tables equal those of Python's `Literal` types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from support.attention_cases import Case, segments

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.codecs.scalar import Scalar
from kvcache_compress.cpu_kernels.attention import launch
from kvcache_compress.cpu_kernels.common.operands import Form
from kvcache_compress.cpu_kernels.encode import launch as encode
from kvcache_compress.storage.view import View

pytestmark = pytest.mark.usefixtures("built")


def names_in_cpp(kind: str, call: Callable[[], object]) -> list[str]:
    """Names that C++ lists in its error for an unknown one."""
    with pytest.raises(RuntimeError, match=f"there is no {kind} 'unknown' among ") as refused:
        call()
    return sorted(str(refused.value).splitlines()[0].partition(" among ")[2].split(", "))


@pytest.mark.parametrize("side", [0, 1])
def test_forms(side: int, make_side: Callable[..., View]) -> None:
    sides = segments(Case(), make_side)
    codec = sides[side].codec
    codec.cpu_side = replace(codec.cpu_side, form="unknown")
    call = partial(launch.attend, AttentionCall.of(torch.randn(2, 6, 1, 64), scaling=0.125), *sides)
    assert names_in_cpp("form", call) == sorted(get_args(Form))


def test_scalars() -> None:
    x = torch.randn(2, 64)
    call = partial(encode.quantize_levels, x, x[:, 0], x[0, :4], 2, "unknown")
    assert names_in_cpp("scalar", call) == sorted(get_args(Scalar))
