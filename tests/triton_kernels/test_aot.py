"""Kernels compiled ahead of time, without a GPU: no spills, and no slower loops than the committed figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import machine_code
import pytest
from compile_kernels import check_sums
from support.paths import ROOT
from support.scripts import run_script

SCRIPT = ROOT / "benchmarks" / "machine_code.py"
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
    for preset in ("polarquant-rope-4bit", "qjl-3bit", "polarquant-3.4bit", "spectral-2bit")
]
TRELLIS = [f"{kernel} turboquant-2bit" for kernel in ("encode keys of", "flush", "write slots")]
STEP = ["append", "write slots", "map step", *ENCODED]

# Instructions per element on sm_90 that the codes of these presets must not exceed (docs/dev/kernels.md).
BUDGET = {
    "turboquant-4bit": 3,
    "turboquant-4bit, mask": 3.2,
    "turboquant-4bit, fixed": 3.3,
    "uniform-2bit": 1.6,
    "lloyd-max-3bit": 3,
    "lloyd-max-2bit": 2.5,
    "lloyd-max-2.5bit": 3,
    "turboquant-4bit, D=64": 4,
    "uniform-4bit": 2.5,
    "kivi-4bit": 4.2,
    "kivi-2bit": 4,
    "polarquant-rope-4bit": 6,
    "polarquant-3.4bit": 6,
    "polarquant-3.1bit": 6,
    "polarquant-paper-offline": 6,
    "polarquant-paper-online": 6,
    "polarquant-paper-plain": 6,
    "qjl-3bit": 6,
    "spectral-2bit": 3.1,
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process that compiles kernels, as this one interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_machine_code_is_as_committed(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    only = [part for name in VARIANTS for part in ("--only", name)]
    result = run("--check", "--output", str(output), *only)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = json.loads(output.read_text())["kernels"]
    assert {"merge turboquant-4bit", *VARIANTS} <= set(kernels)
    for name, targets in kernels.items():
        assert set(targets) == {"sm_80", "sm_90", "sm_100", "gfx942"}
        most = 48 if name == "kivi-4bit, D=256" else 0  # see KNOWN_STACK
        assert all(targets[target]["stack_bytes"] <= most for target in ("sm_80", "sm_90", "sm_100"))
    assert 0 < kernels["turboquant-4bit"]["sm_90"]["instructions_per_element"] < BUDGET["turboquant-4bit"]


@pytest.mark.slow
def test_every_method_compiles_without_spills(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    names = ["commvq-2bit", *METHODS, *MASKED, *(f"encode keys of {name}" for name in METHODS), *ENCODED, *TRELLIS]
    only = [part for name in names for part in ("--only", name)]
    result = run("--check", "--target", "sm_90", "--output", str(output), *only)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = json.loads(output.read_text())["kernels"]
    assert set(names) <= set(kernels)
    spilling = {name for name, figures in kernels.items() if figures["sm_90"]["stack_bytes"]}
    assert spilling <= SPILLING, "see KNOWN_STACK"


@pytest.mark.slow
def test_every_method_compiles_on_the_oldest_triton(tmp_path: Path, oldest_triton: str) -> None:
    output = tmp_path / "kernels.json"
    presets = [*METHODS, "turboquant-2.5bit", "kivi-4bit", "polarquant-paper-offline"]
    names = [*presets, "commvq-2bit", "commvq-paper", *(f"encode keys of {name}" for name in presets), *STEP, *TRELLIS]
    only = [part for name in names for part in ("--only", name)]
    result = run("--target", "sm_90", "--output", str(output), *only, PYTHONPATH=oldest_triton)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(output.read_text())
    assert written["versions"]["triton"].startswith("3.5.")
    assert set(names) <= set(written["kernels"])


PRODUCT = "mul.f32 \t%r3, %r1, %r2;\nshfl.sync.bfly.b32 \t%r4, %r3, 16, 31, -1;\n"


def test_products_that_one_lane_rounds_and_the_other_does_not_are_refused() -> None:
    check_sums("kernel", PRODUCT + "add.f32 \t%r5, %r3, %r4;\nfma.rn.f32 \t%r6, %r4, %r1, %r5;")
    with pytest.raises(RuntimeError, match="kernel sums unrounded products over lanes"):
        check_sums("kernel", PRODUCT + "fma.rn.f32 \t%r5, %r1, %r2, %r4;")


# Integer and logic instructions per element on sm_90, which run at half rate (docs/dev/kernels.md#the-budget).
INTEGER_BUDGET = {
    "turboquant-4bit": 2.2,
    "turboquant-4bit, mask": 2.3,
    "turboquant-4bit, fixed": 2.4,
    "uniform-4bit": 1.1,
    "uniform-2bit": 0.87,
    "kivi-4bit": 1.4,
    "kivi-2bit": 1.0,  # three bits per number with scales and zero points, which leave room for 1.16
}


@pytest.mark.parametrize("name", INTEGER_BUDGET)
def test_committed_integer_instructions_are_within_the_budget(name: str) -> None:
    figures = machine_code.load(machine_code.RESULTS)[name]["sm_90"]
    assert figures.loop is not None
    assert figures.instructions_per_element is not None
    share = figures.loop.pipes["alu"] / figures.loop.instructions
    assert 0 < share * figures.instructions_per_element <= INTEGER_BUDGET[name]


@pytest.mark.parametrize("name", BUDGET)
def test_committed_figures_are_within_the_budget(name: str) -> None:
    kernels = json.loads((ROOT / "benchmarks" / "results" / "kernels.json").read_text())["kernels"]
    assert 0 < kernels[name]["sm_90"]["instructions_per_element"] <= BUDGET[name]


def test_committed_figures_make_a_table() -> None:
    result = run_script(machine_code.main, "--table")
    assert result.exit_code == 0, result.output
    assert "| turboquant-4bit |" in result.stdout
