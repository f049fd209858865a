"""Launches that are repeated without Triton inspecting their arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.paths import ROOT

from kvcache_compress.triton_kernels.common.plan import Launch


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


@pytest.mark.parametrize("moved", [False, True])
def test_a_lane_table_that_the_compiler_moves_is_refused(moved: bool) -> None:
    """A launch looks at what was compiled for its device; one that is refused is not repeated."""
    line = "ttg.convert_layout %8 : tensor<1x1xi32, #blocked> -> tensor<1x1xi32, #mma>" if moved else "tt.return"
    compiled = SimpleNamespace(
        name="attend", hash=f"moved: {moved}", asm={"ptx": "mov.u32 %r1, %laneid;", "ttgir": line}
    )

    class Kernel:
        arg_names: ClassVar[list[str]] = ["p_x"]

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return lambda **_: compiled

    launch = Launch((Kernel(), (1, 1, 1), {"p_x": torch.zeros(1)}), {})
    if not moved:
        launch.first({})
        assert launch.compiled is compiled
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"attend moves a tile \[1, 1\] between lanes"):
            launch.first({})
    assert launch.compiled is None
