"""The README says what the result files hold, and its code runs."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvcache_compress import load_config
from kvcache_compress.eval.results import PerplexityResult

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))


@pytest.fixture(scope="module")
def result(script: dict[str, Any]) -> PerplexityResult:
    return script["results"]()[0]


def test_tables_are_those_of_the_result_files(script: dict[str, Any]) -> None:
    assert "| turboquant-4bit |" in README
    assert script["render"](README, *script["results"]()) == README, "run: python benchmarks/readme.py"


def test_measured_losses_keep_their_bounds(result: PerplexityResult) -> None:
    """The project's own targets for this protocol; a result file that breaks them must not be committed unnoticed."""
    kl = {row.name: row.kl for row in result.rows}
    assert kl["turboquant-4bit@sinks=0,recent=0"] <= 0.011
    assert kl["turboquant-3bit@sinks=0,recent=0"] <= 0.042
    assert kl["turboquant-4bit"] <= 0.0045
    assert kl["turboquant-3bit"] <= 0.020
    assert kl["turboquant-k3v2"] <= 0.029
    assert all(row.packed_tokens > 0 for row in result.rows if row.name != "full")


def test_yaml_snippet_is_a_config(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    (text,) = snippets("yaml")
    path.write_text(text, encoding="utf-8")
    assert load_config(path).layers[0].method == "none"


@pytest.mark.slow
def test_python_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    for code in snippets("python"):
        exec(code, scope)
    printed = capsys.readouterr().out
    assert "bits per packed number" in printed
    packed = re.search(r"(\d+) tokens packed", printed)
    assert packed is not None
    assert int(packed[1]) > 0
