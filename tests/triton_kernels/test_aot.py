"""Kernels compiled ahead of time, without a GPU: registers do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_code import check_sums
from support.paths import ROOT

SCRIPT = ROOT / "benchmarks" / "kernels" / "machine_code.py"
# The variants with the most registers, and the most important one.
VARIANTS = ["turboquant-4bit", "prod-2.5bit", "kivi-4bit, D=256", "encode values of turboquant-4bit"]
# One of each other method, with its encoders; for one target only, as they take long to compile.
METHODS = ["polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit", "spectral-2bit"]
SPILLING = {"encode keys of polarquant-3.4bit"}
"""Variants that use the stack; `KNOWN_STACK` in the script bounds how much."""
MASKED = [f"{name}, {path}" for name in ("turboquant-4bit", "turboquant-2bit") for path in ("mask", "fixed")]

# The other kernels in steps of growing and static caches, encoders included.
ENCODED = [
    f"{kernel} {preset}"
    for kernel in ("flush", "write slots")
    for preset in ("polarquant-rope-4bit", "polarquant-3.4bit")
]
TRELLIS = [f"{kernel} turboquant-2bit" for kernel in ("encode keys of", "flush", "write slots")]
STEP = ["append", "write slots", "map step", *ENCODED]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process that compiles kernels, as this one interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_largest_kernels_do_not_spill(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    only = [part for name in VARIANTS for part in ("--only", name)]
    result = run("--output", str(output), *only)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = json.loads(output.read_text())["kernels"]
    assert {"merge turboquant-4bit", *VARIANTS} <= set(kernels)
    for name, targets in kernels.items():
        assert set(targets) == {"sm_80", "sm_90", "sm_100", "gfx942"}
        most = 48 if name == "kivi-4bit, D=256" else 0  # see KNOWN_STACK
        assert all(targets[target]["stack_bytes"] <= most for target in ("sm_80", "sm_90", "sm_100"))
        assert all(0 < figures["registers"] <= 512 for figures in targets.values())


@pytest.mark.slow
def test_every_method_compiles_without_spills(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    names = ["commvq-2bit", *METHODS, *MASKED, *(f"encode keys of {name}" for name in METHODS), *ENCODED, *TRELLIS]
    only = [part for name in names for part in ("--only", name)]
    result = run("--target", "sm_90", "--output", str(output), *only)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = json.loads(output.read_text())["kernels"]
    assert set(names) <= set(kernels)
    spilling = {name for name, figures in kernels.items() if figures["sm_90"]["stack_bytes"]}
    assert spilling <= SPILLING, "see KNOWN_STACK"


@pytest.mark.slow
def test_every_method_compiles_on_the_oldest_triton(tmp_path: Path, oldest_triton: str) -> None:
    output = tmp_path / "kernels.json"
    presets = [*METHODS, "kivi-4bit"]
    names = [*presets, "commvq-2bit", *(f"encode keys of {name}" for name in METHODS), *STEP, TRELLIS[1]]
    only = [part for name in names for part in ("--only", name)]
    result = run("--target", "sm_90", "--output", str(output), *only, PYTHONPATH=oldest_triton)
    assert output.exists(), result.stdout + result.stderr
    written = json.loads(output.read_text())
    assert written["versions"]["triton"].startswith("3.5.")
    assert set(names) <= set(written["kernels"])


PRODUCT = "mul.f32 \t%r3, %r1, %r2;\nshfl.sync.bfly.b32 \t%r4, %r3, 16, 31, -1;\n"


def test_products_that_one_lane_rounds_and_the_other_does_not_are_refused() -> None:
    check_sums("kernel", PRODUCT + "add.f32 \t%r5, %r3, %r4;\nfma.rn.f32 \t%r6, %r4, %r1, %r5;")
    with pytest.raises(RuntimeError, match="kernel sums unrounded products over lanes"):
        check_sums("kernel", PRODUCT + "fma.rn.f32 \t%r5, %r1, %r2, %r4;")
