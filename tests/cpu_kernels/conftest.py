"""Fixtures of the C++ code's tests."""

import shutil

import pytest
import torch
from support.kernels.segment_makers import poison  # noqa: F401
from torch.torch_version import TorchVersion

from kvcache_compress.cpu_kernels import build


@pytest.fixture
def built() -> None:
    """Skip if the C++ code cannot be built here, and fail if it could be but does not load."""
    if TorchVersion(torch.__version__) < (2, 10) or shutil.which("c++") is None:
        pytest.skip("no compiler, or a PyTorch before 2.10")
    assert build.problem() is None
