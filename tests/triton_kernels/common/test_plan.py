"""Launches that are repeated without Triton's own look at their arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.skipif("KVCACHE_COMPRESS_TEST_DEVICE" in os.environ, reason="its driver stands in for a GPU")
@pytest.mark.parametrize("oldest", [False, True], ids=["pinned", "oldest"])
def test_repeated_launches_are_those_that_triton_would_make(oldest: bool, request: pytest.FixtureRequest) -> None:
    """In a process of its own, where the kernels are compiled: here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT / "tests"), *([request.getfixturevalue("oldest_triton")] if oldest else ())]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    worker = ROOT / "tests" / "support" / "plan_worker.py"
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all launches are as Triton's" in done.stdout
