"""The script that times storing a step's token on the CPU."""

from __future__ import annotations

import re

import step_time
from support.scripts import run_script

PRESETS = ("commvq-paper", "turboquant-mixed")


def test_prints_a_table() -> None:
    """CommVQ with codebooks for a model of one layer, and presets with rules for single layers."""
    done = run_script(step_time.main, "--turns", "1", *(f"--preset={name}" for name in PRESETS))
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\| `([\w.-]+)` \|((?: [\d.,]+ \|){4})$", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == [*PRESETS]
    assert all(float(cell) > 0 for _, cells in rows for cell in cells.split("|")[:-1])
