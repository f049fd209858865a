"""Fixtures of the kernels' tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernels.device import EMULATED
from support.kernels.segment_makers import poison  # noqa: F401

if EMULATED:
    from support.ptx.launch import Emulator, emulate

    collect_ignore = ["test_aot.py", "test_compiled.py"]  # they launch nothing here
    _EMULATOR = emulate(EMULATED)

    @pytest.fixture(autouse=True)
    def emulator() -> Iterator[Emulator]:
        """What runs the launches; a test fails whose launches race, or read what nobody has written."""
        _EMULATOR.launches.clear()
        yield _EMULATOR
        assert not (found := [line for launch in _EMULATOR.launches for line in launch.report()]), "\n".join(found)


@pytest.fixture
def oldest_triton() -> str:
    """Folder where the Makefile installs the oldest supported Triton, next to the environment's."""
    folder = Path(sys.prefix) / "oldest-triton"
    if not folder.exists():
        pytest.skip("make venv installs the oldest Triton where there is one")
    return str(folder)
