"""Fixtures of the kernels' tests."""

import sys
from pathlib import Path

import pytest
from support.segment_makers import make_codec, make_side, poison  # noqa: F401


@pytest.fixture
def oldest_triton() -> str:
    """Where the Makefile puts the oldest Triton that is supported, beside the one of the environment."""
    folder = Path(sys.prefix) / "oldest-triton"
    if not folder.exists():
        pytest.skip("make venv installs the oldest Triton where there is one")
    return str(folder)
