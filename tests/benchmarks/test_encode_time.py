"""The script that times encoding on the CPU."""

from __future__ import annotations

import re
import shutil

import encode_time
import pytest
from support.scripts import run_script


@pytest.mark.skipif(shutil.which("c++") is None, reason="it compares C++ with torch")
def test_prints_a_table() -> None:
    presets = [f"--preset={name}" for name in ("turboquant-2.5bit", "polarquant-3.4bit", "commvq-paper")]
    done = run_script(encode_time.main, "--tokens", "32", "--turns", "1", *presets)
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \|((?: [\d.,]+ \|){4})$", done.stdout, re.MULTILINE)
    assert [(name, side) for name, side, _ in rows] == [
        (preset.removeprefix("--preset="), side) for preset in presets for side in ("keys", "values")
    ]
    assert all(float(cell.replace(",", "")) > 0 for *_, cells in rows for cell in cells.split("|")[:-1])
