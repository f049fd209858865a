"""Examples: the commands of `examples/README.md` and the notebook run, and print what is committed there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_examples
from support.paths import ROOT

from kvcache_compress import load_config

DOCUMENTED = run_examples.documented()
NOTEBOOK = run_examples.NOTEBOOK.name


def test_the_configuration_plans_a_model() -> None:
    plans = load_config(ROOT / "examples" / "mixed.yaml").plan(["full_attention"] * 30)
    assert [plan.compresses for plan in plans] == [False, *[True] * 28, False]
    assert (plans[1].keys.options().estimator, plans[6].keys.options().estimator) == ("prod", "mse")
    assert plans[1].recent_tokens == 32


def test_every_example_is_on_the_page() -> None:
    assert {Path(command.split()[0]) for command in DOCUMENTED} == {
        path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")
    }


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of all commands and of the notebook, in a process without Triton's interpreter."""
    output = tmp_path_factory.mktemp("examples") / "printed.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONWARNINGS"] = "error:`past_key_values` is deprecated:FutureWarning"
    command = [sys.executable, str(ROOT / "benchmarks" / "run_examples.py"), "--output", str(output)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(output.read_text(encoding="utf-8")))


def shape(text: str) -> list[str]:
    """Lines without the values of numbers, quoted texts, and the widths of columns."""
    text = re.sub(r"(?<=[ ,:])'[^\n]*?'(?=[,\n])|(?<=[ ,:])\"[^\n]*?\"(?=[,\n])", "'...'", text)
    lines = re.sub(r"\d[\d,]*(\.\d+)?", "#", text).splitlines()
    return ["..." if line.startswith("...") else " ".join(line.split()) for line in lines]


@pytest.mark.slow
def test_outputs_are_those_of_the_page(printed: dict[str, str]) -> None:
    committed = DOCUMENTED | {NOTEBOOK: run_examples.notebook_text(run_examples.read_notebook())}
    for command, text in committed.items():
        assert text.strip(), "run: python benchmarks/run_examples.py"
        assert shape(printed[command]) == shape(text), command


def numbers(text: str, pattern: str) -> list[float]:
    """The numbers that a pattern's group finds in a text."""
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.slow
def test_outputs_show_what_examples_are_for(printed: dict[str, str]) -> None:
    texts = {Path(command.split()[0]).stem: text for command, text in printed.items()}
    full, packed = numbers(texts["long_document"], r"([\d.]+) MiB")
    assert packed < 0.7 * full
    assert "called Amos" in texts["chat"]
    fed = numbers(texts["chat"], r"(\d+) tokens fed")
    assert max(fed[1:]) < 0.2 * fed[0], "a later turn fed more than its own tokens"
    tuned, equal = numbers(texts["tune_and_use"], r"KL ([\d.]+)")
    assert tuned < equal
    for kind in ("trained on", "held out"):
        (line,) = (line for line in texts["calibrate_commvq"].splitlines() if line.startswith(kind))
        errors = numbers(line, r"([\d.]+)")
        assert errors == sorted(errors, reverse=True)
    assert numbers(texts["lm_eval_task"], r"exact_match,none ([\d.]+)")[0] >= 0.5
    assert "built of ... granite" in texts["shared_prefix"]
    light, coarse = numbers(texts["quickstart"], r"bit: ([\d.]+)")
    assert light < coarse < 1
