"""Fixtures of the kernels' tests."""

import sys
from pathlib import Path

import pytest
from support.segment_makers import make_codec, make_side, poison  # noqa: F401


@pytest.fixture
def oldest_triton() -> str:
    """Folder where the Makefile installs the oldest supported Triton, next to the environment's."""
    folder = Path(sys.prefix) / "oldest-triton"
    if not folder.exists():
        pytest.skip("make venv installs the oldest Triton where there is one")
    return str(folder)
