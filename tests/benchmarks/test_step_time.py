"""The script that times storing a step's token on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys

from support.paths import ROOT

PRESETS = ("commvq-paper", "turboquant-mixed")


def test_prints_a_table() -> None:
    """CommVQ with codebooks for a model of one layer, and presets with rules for single layers."""
    command = [sys.executable, "benchmarks/step_time.py", "--turns", "1", *(f"--preset={name}" for name in PRESETS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `([\w.-]+)` \|((?: [\d.,]+ \|){4})$", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == [*PRESETS]
    assert all(float(cell) > 0 for _, cells in rows for cell in cells.split("|")[:-1])
