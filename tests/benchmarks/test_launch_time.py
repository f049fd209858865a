"""The script that times the Python part of a decode step, over a driver that does nothing."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver's stand-in is compiled")
def test_a_step_launches_four_kernels() -> None:
    """Run the script in a separate process, which compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Both sides are encoded in every 32nd step, a launch each; with a static capacity by the first of the four.
    for options, launches in ([], 4.0625), (["--max-cache-len", "512"], 4):
        command = [sys.executable, "benchmarks/launch_time.py", "--tokens", "256", "--steps", "64", *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = re.search(r"([\d.]+) us, median ([\d.]+) us, ([\d.]+) launches$", done.stdout.strip())
        assert found is not None, done.stdout
        assert float(found[2]) > 0
        assert float(found[3]) == pytest.approx(launches, abs=0.01)
