"""Launches that are repeated without Triton inspecting their arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.skipif("KVCACHE_COMPRESS_TEST_DEVICE" in os.environ, reason="its driver stands in for a GPU")
@pytest.mark.parametrize("oldest", [False, True], ids=["pinned", "oldest"])
def test_repeated_launches_are_those_that_triton_would_make(oldest: bool, request: pytest.FixtureRequest) -> None:
    """Run `plan_worker.py` in a separate process, which compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT / "tests"), *([request.getfixturevalue("oldest_triton")] if oldest else ())]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    worker = ROOT / "tests" / "support" / "plan_worker.py"
    done = subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all launches are as Triton's" in done.stdout
