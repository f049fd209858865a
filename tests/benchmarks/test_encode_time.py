"""The script that times encoding on the CPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from support.paths import ROOT


@pytest.mark.skipif(shutil.which("c++") is None, reason="it compares C++ with torch")
def test_prints_a_table() -> None:
    presets = [f"--preset={name}" for name in ("turboquant-2.5bit", "polarquant-3.4bit", "commvq-paper")]
    command = [sys.executable, "benchmarks/encode_time.py", "--tokens", "32", "--turns", "1", *presets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \|((?: [\d.,]+ \|){4})$", done.stdout, re.MULTILINE)
    assert [(name, side) for name, side, _ in rows] == [
        (preset.removeprefix("--preset="), side) for preset in presets for side in ("keys", "values")
    ]
    assert all(float(cell.replace(",", "")) > 0 for *_, cells in rows for cell in cells.split("|")[:-1])
