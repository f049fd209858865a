"""Commands that are generated from the options of benchmarks."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.models.saved_model import saved_model
from typer.testing import CliRunner

from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.eval.runner.table import read_cells
from kvcache_compress.eval.tasks import BENCHMARKS, make_benchmark
from kvcache_compress.eval.tasks.benchmark import Benchmark
from kvcache_compress.eval.tasks.needle import Needle


def help_lines(name: str) -> dict[str, str]:
    """The line of each option in a command's help."""
    ran = CliRunner(env={"COLUMNS": "400"}).invoke(app, [name, "--help"])
    assert ran.exit_code == 0, ran.output
    return {words[0]: line for line in ran.output.splitlines() if (words := re.findall(r"--[a-z][a-z-]*", line))}


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.kind)
def test_every_field_and_every_argument_of_measure_is_an_option(benchmark: type[Benchmark]) -> None:
    lines = help_lines(benchmark.kind)
    repeatable = {"texts": "text", "tasks": "task", "lengths": "length", "depths": "depth", "cases": "case"}
    common = ["cache", "model", "codebooks", "statistics", "output", "seed", "dtype", "device", "fused"]
    names = [*benchmark.model_fields, *common]
    assert lines.keys() == {f"--{repeatable.get(name, name).replace('_', '-')}" for name in names} | {"--help"}
    for name, field in benchmark.model_fields.items():
        description = "Random seed." if name == "seed" else field.description
        assert description in lines[f"--{repeatable.get(name, name).replace('_', '-')}"]


def test_types_defaults_and_bounds_are_those_of_the_fields() -> None:
    lines = help_lines("needle")
    assert "1024, 2048, 4096" in lines["--length"]
    assert "0.0, 0.25, 0.5, 0.75, 1.0" in lines["--depth"]
    assert "1<=x<=1000" in lines["--digits"]
    assert "needle|passkey" in lines["--mode"]
    assert "--no-cached-question" in lines["--cached-question"]
    assert "required" in help_lines("ruler")["--data"]
    assert "required" in help_lines("turns")["--text"]


def test_values_reach_the_benchmark_and_its_run(tmp_path: Path) -> None:
    words = ["--length", "240", "--length", "250", "--seed", "3", "--limit", "2", "--no-cached-question"]
    words += ["--mode", "passkey"]
    ran = CliRunner().invoke(app, ["needle", *words, "--model", saved_model(), "--output", str(tmp_path / "r.jsonl")])
    assert ran.exit_code == 0, ran.output
    expected = Needle(lengths=[240, 250], seed=3, limit=2, cached_question=False, mode="passkey")
    cells = read_cells(tmp_path / "r.jsonl")
    assert {cell.cache["name"] for cell in cells} == {"full", "turboquant-4bit", "turboquant-2bit"}
    for cell in cells:
        assert cell.benchmark["options"] == expected.model_dump(mode="json", exclude={"limit"})
        assert (cell.seed, cell.samples) == (3, 2)


def test_wrong_options_are_one_line_or_a_usage_error(tmp_path: Path) -> None:
    for words, named in (
        (["needle", "--length", "0"], "lengths.0=0"),
        (["perplexity", "--cache", "fp8@sinks=1"], "cache='fp8@sinks=1'"),
        (["perplexity", "--cache", "fp8", "--output", str(tmp_path)], f"output='{tmp_path}'"),
        (["needle", "--length", "300", "--haystack", "nowhere", "--cache", "fp8"], "haystack='nowhere'"),
        (["longbench", "--data", "gone.jsonl", "--cache", "fp8"], "data='gone.jsonl'"),
    ):
        ran = CliRunner().invoke(app, [*words, "--model", saved_model()])
        assert (ran.exit_code, ran.stderr.startswith("error: ")) == (1, True), ran.output
        assert named in ran.stderr
    ran = CliRunner().invoke(app, ["needle", "--digits", "0"])
    assert (ran.exit_code, "--digits" in ran.stderr) == (2, True)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("chess", {}, "benchmark='chess'"),
        ("perplexity", {"widows": 1}, "'widows'"),
        ("perplexity", {"scored": 16, "step": 17}, "step=17"),
        ("ruler", {}, "ruler: data"),
        ("ruler", {"data": "x.jsonl", "task": "sums"}, "task='sums'"),
        ("needle", {"needle": "N {answer}."}, r"needs needle, question, answer together \(got needle\)"),
        ("needle", {"mode": "passkey", "needle": "N.", "question": "Q?"}, r"needle='N\.'"),
        ("needle", {"depths": [1.5]}, r"depths\.0=1\.5"),
        ("turns", {"texts": ["a"]}, "texts="),
        ("turns", {"texts": ["a", "b"], "scored": 8, "step": 9}, "step=9: must be at most scored=8"),
        ("turns", {"texts": ["a", "b"], "cases": []}, "cases="),
        ("turns", {"texts": ["a", "b"], "cases": [True]}, r"cases\.0=True"),
        *(
            (
                "turns",
                {"texts": ["a", "b"], "cases": ["12+20", case]},
                rf"cases\.1: .*{re.escape(str(case))[:50]}.* is no case",
            )
            for case in ("", "0+20", "20 + 30", "20+", "20like", 2.5, "9" * 5000)
        ),
    ],
)
def test_bad_options(kind: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        make_benchmark(kind, options)
    assert "\n" not in str(caught.value)
