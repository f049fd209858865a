"""The script that times the host's part of a decode step, over a driver that does nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import launch_time
import pytest
from support.paths import ROOT
from support.scripts import run_script


@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver's stand-in is compiled")
def test_a_step_launches_four_kernels_and_says_where_time_goes() -> None:
    """Run the script in a separate process, which compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    few = ["--tokens", "256", "--calls", "32", "--rounds", "2", "--profile"]
    # Both sides are encoded in every 32nd step, a launch each; with a static capacity by the first of the four.
    for options, encoding in (([], 0.0625), (["--max-cache-len", "512"], 0)):
        command = [sys.executable, "benchmarks/launch_time.py", *few, *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pattern = r"^(\w+ \w+) +([\d.]+) us, median +([\d.]+) us, ([\d.]+) launches$"
        found = re.findall(pattern, done.stdout, re.MULTILINE)
        assert all(float(mean) > 0 and float(median) > 0 for _, mean, median, _ in found)
        launches = {name: float(made) for name, *_, made in found}
        expected = {"attention alone": 3, "update alone": 1 + encoding, "whole step": 4 + encoding}
        assert launches == pytest.approx(expected, abs=0.01)
    assert re.search(r"^ +[\d.]+ +[\d.]+ +1\.00   launch_time\.py:\d+ step$", done.stdout, re.MULTILINE)


def test_interpreted_kernels_are_refused() -> None:
    done = run_script(launch_time.main)
    assert done.exit_code == 2
    assert "unset TRITON_INTERPRET" in " ".join(done.stderr.replace("│", " ").split())
