"""The host's part of a decode step, timed over a driver that does nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver's stand-in is compiled")
def test_a_step_launches_four_kernels_and_says_where_time_goes() -> None:
    """In a process of its own, where the kernels are compiled: here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    few = ["--tokens", "256", "--calls", "32", "--rounds", "2", "--profile"]
    command = [sys.executable, "benchmarks/launch_time.py", *few]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+ \w+) +([\d.]+) us, ([\d.]+) launches$", done.stdout, re.MULTILINE)
    assert all(float(microseconds) > 0 for _, microseconds, _ in found)
    # Keys and values are encoded in every thirty-second step, a launch each.
    launches = {name: float(made) for name, _, made in found}
    assert launches == pytest.approx({"attention alone": 3, "update alone": 1.0625, "whole step": 4.0625}, abs=0.01)
    assert re.search(r"^ +[\d.]+ +[\d.]+ +1\.00   launch_time\.py:\d+ step$", done.stdout, re.MULTILINE)


def test_interpreted_kernels_are_refused() -> None:
    command = [sys.executable, "benchmarks/launch_time.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unset TRITON_INTERPRET" in " ".join(done.stderr.replace("│", " ").split())
