"""Examples: each runs as it is in the repository."""

import os
import runpy
import subprocess
import sys

import pytest
from support.paths import ROOT

from kvcache_compress import load_config


def test_the_configuration_plans_a_model() -> None:
    plans = load_config(ROOT / "examples" / "mixed.yaml").plan(["full_attention"] * 30)
    assert [plan.compresses for plan in plans] == [False, *[True] * 28, False]
    assert (plans[1].keys.options().estimator, plans[6].keys.options().estimator) == ("prod", "mse")
    assert plans[1].recent_tokens == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed"),
    [("generate.py", "bits per packed number"), ("shared_prefix.py", "built of ... granite")],
)
def test_examples(name: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path(f"examples/{name}", run_name="__main__")
    assert printed in capsys.readouterr().out


@pytest.mark.slow
def test_own_method() -> None:
    """In a process of its own, as other tests here have registered the method."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "examples/own_method.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3.75 bits per packed number" in done.stdout
