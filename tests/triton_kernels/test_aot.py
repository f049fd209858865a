"""Kernels compiled ahead of time, without a GPU: registers do not spill."""

import json
import os
import re
import subprocess
import sys

import pytest
from machine_code import check_sums
from support.paths import ROOT

LARGEST, LARGEST_TARGETS = ["turboquant-4bit", "kivi-4bit, D=256"], ["sm_90", "gfx942"]
"""The case with the most registers, the most important one, and a target of each of the two compilers."""
METHODS = ["polarquant-3.4bit", "qjl-3bit", "spectral-2bit", "commvq-2bit"]
"""One of each other method, for one target; `make kernels` has all cases and targets."""
ON_THE_OLDEST = ["polarquant-3.4bit", "polarquant-rope-4bit", "qjl-3bit", "kivi-4bit", "commvq-2bit"]
"""Methods that `test_compiled.py` does not run with the oldest Triton."""


IN_ONE_PROCESS = """
import contextlib, json, sys, machine_code, typer
from concurrent.futures import ThreadPoolExecutor
machine_code.ProcessPoolExecutor = lambda *_: ThreadPoolExecutor(1)
for cases, targets in json.loads(sys.argv[1]):
    with contextlib.suppress(typer.Exit):
        machine_code.main(cases, targets)
"""
"""Runs of the script without workers, each of which would import PyTorch for longer than it compiles."""


def compiled(*runs: tuple[list[str], list[str]], triton: str = "") -> tuple[set[tuple[str, str]], str]:
    """Compile cases for targets in another process, as this one interprets kernels: (target, kernel) pairs, output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = triton, str(ROOT / "benchmarks" / "kernels"), environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(runs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.findall(r"^(\w+), (.*): [1-9]\d* registers", done.stdout, re.MULTILINE)
    return set(found), done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_do_not_spill() -> None:
    found, output = compiled((LARGEST, LARGEST_TARGETS), (METHODS, ["sm_90"]))
    assert output.count("no spills but the known ones") == 2, output
    assert {(target, f"{name}: attend_kernel") for target in LARGEST_TARGETS for name in LARGEST} <= found
    assert {("sm_90", f"{name}: attend_kernel") for name in METHODS} <= found
    kernels = {kernel.partition(": ")[2] for _, kernel in found}
    assert {"attend_kernel", "encode_kernel", "step_kernel"} < kernels


@pytest.mark.slow
def test_methods_compile_on_the_oldest_triton(oldest_triton: str) -> None:
    found, output = compiled((ON_THE_OLDEST, ["sm_90"]), triton=oldest_triton)
    missing = {name for name in ON_THE_OLDEST if ("sm_90", f"{name}: attend_kernel") not in found}
    assert not missing, output


PRODUCT = "mul.f32 \t%r3, %r1, %r2;\nshfl.sync.bfly.b32 \t%r4, %r3, 16, 31, -1;\n"


def test_products_that_one_lane_rounds_and_the_other_does_not_are_refused() -> None:
    check_sums("kernel", PRODUCT + "add.f32 \t%r5, %r3, %r4;\nfma.rn.f32 \t%r6, %r4, %r1, %r5;")
    with pytest.raises(RuntimeError, match="kernel sums unrounded products over lanes"):
        check_sums("kernel", PRODUCT + "fma.rn.f32 \t%r5, %r1, %r2, %r4;")
