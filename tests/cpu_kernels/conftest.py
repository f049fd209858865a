"""Fixtures of the C++ code's tests."""

import pytest
from segment_makers import make_codec, make_side, poison  # noqa: F401

from kvcache_compress.cpu_kernels import build


@pytest.fixture(autouse=True)
def _built() -> None:
    if problem := build.problem():
        pytest.skip(problem)
