"""Commands made from options of benchmarks; comparisons: interrupted, with errors, replayed."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.models.saved_model import saved_model
from support.models.small_model import method_config, small_model
from support.models.toy_tokenizers import word_tokenizer
from typer.testing import CliRunner

from kvcache_compress.cli.evaluate.app import app
from kvcache_compress.eval.runner.comparison import Comparison, compare
from kvcache_compress.eval.runner.table import Cell, read_cells
from kvcache_compress.eval.tasks import BENCHMARKS, make_benchmark
from kvcache_compress.eval.tasks.benchmark import Benchmark
from kvcache_compress.eval.tasks.needle import Needle

WORDS = [f"w{index:02d}" for index in range(64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a tokenizer and a text."""
    folder = tmp_path_factory.mktemp("comparison")
    small_model().save_pretrained(folder / "model")
    word_tokenizer(WORDS, pad_token="w00", unk_token="w01").save_pretrained(folder / "model")
    text = " ".join(WORDS[index * index % 61] for index in range(1000))
    (folder / "text.txt").write_text(text)
    (folder / "long.txt").write_text(" ".join([text] * 5))
    return folder


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    sizes = {"prefix": 100, "scored": 16, "windows": 4}
    return {
        "models": [str(folder / "model")],
        "caches": ["fp8", {"name": "mine", "config": method_config("turboquant")}],
        "benchmarks": {"words": {"kind": "perplexity", "texts": [str(folder / "text.txt")], **sizes}},
        "output": str(folder / "results.jsonl"),
        **changes,
    }


def write(path: Path, content: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def by_name(output: Path) -> dict[str, Cell]:
    return {cell.cache["name"]: cell for cell in read_cells(output)}


def test_command(folder: Path, tmp_path: Path) -> None:
    content = settings(folder)
    del content["output"]
    path = write(tmp_path / "c.yaml", content)
    ran = CliRunner().invoke(app, ["compare", path, "--output", str(tmp_path / "out.jsonl")])
    assert ran.exit_code == 0, ran.output
    cells = by_name(tmp_path / "out.jsonl")
    assert set(cells) == {"full", "fp8", "mine"}
    assert (cells["full"].score, cells["mine"].samples) == (0.0, 4)
    assert 0 < cells["mine"].packed_tokens["least"] < 100
    assert cells["mine"].cache["config"]["recent_tokens"] == method_config("turboquant")["recent_tokens"]
    assert str(folder) not in (tmp_path / "out.jsonl").read_text()
    assert re.search(r"mine +\d\.\d\d", ran.output)
    again = CliRunner().invoke(app, ["compare", path, "--output", str(tmp_path / "out.jsonl")])
    assert "[0/0] words" in again.stderr
    assert by_name(tmp_path / "out.jsonl") == cells


def test_what_is_wrong_stays_where_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = settings(folder)["benchmarks"]["words"]
    benchmarks = {
        "nowhere": good | {"texts": [str(tmp_path / "nowhere.txt")]},
        "long": good | {"prefix": 4090, "scored": 16, "windows": 1, "texts": [str(folder / "long.txt")]},
        "words": good,
    }
    entries = [{"name": "wide", "config": "qjl-3bit"}, {"name": "mine", "config": method_config("turboquant")}]
    content = settings(folder, caches=entries, benchmarks=benchmarks, models=["nobody/nothing", str(folder / "model")])
    path = write(tmp_path / "c.yaml", content)
    ran = CliRunner().invoke(app, ["compare", path, "--output", str(tmp_path / "out.jsonl")])
    assert ran.exit_code == 1
    assert "error: model nobody/nothing: name='nobody/nothing'" in ran.stderr
    cells = {(cell.benchmark["name"], cell.cache["name"]): cell for cell in read_cells(tmp_path / "out.jsonl")}
    assert cells["words", "mine"].error is None
    assert "no such file" in cells["nowhere", "full"].error
    assert "4106 tokens" in cells["long", "full"].error
    monkeypatch.setitem(sys.modules, "hqq", None)
    ran = CliRunner().invoke(app, ["compare", write(tmp_path / "c.yaml", settings(folder, caches=["hqq-4"]))])
    assert 'need hqq: pip install "kvcache-compress[peers]"' in ran.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": [{"model": "m", "codebook": "c"}]}, r"'models\.0\.codebook'"),
        ({"models": ["m", {"model": "m", "codebooks": "c"}]}, "models: m more than once"),
        ({"caches": ["turboquant-9bit"]}, "turboquant-9bit"),
        ({"caches": ["fp8", "fp8"]}, "caches: fp8 more than once"),
        ({"caches": [{"config": "qjl-3bit"}]}, r"caches\.0\.name"),
        ({"benchmarks": {"a": {"kind": ["x"]}}}, r"benchmarks\.a: needs a `kind`"),
        ({"benchmarks": {"a": {"kind": "chess"}}}, r"benchmarks\.a: benchmark='chess'"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"output": "results"}, "output='results'"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write(tmp_path / "c.yaml", settings(folder, output=str(tmp_path / "out.jsonl")) | changes)
    with pytest.raises(ValueError, match=named):
        compare(Comparison.read(Path(path)))
    ran = CliRunner().invoke(app, ["compare", path])
    assert ran.exit_code == 1
    assert ran.stderr.startswith(f"error: {path}: ")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[str, Path]:
    """A finished comparison with two benchmarks: its YAML file and its results."""
    given = settings(folder)
    words = given["benchmarks"]["words"]
    given |= {"benchmarks": {"words": words, "more": words}, "output": str(folder / "finished.jsonl")}
    path = write(folder / "finished.yaml", given)
    ran = CliRunner().invoke(app, ["compare", path])
    assert ran.exit_code == 0, ran.output
    return path, folder / "finished.jsonl"


def replay(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_figures_hold(finished: tuple[str, Path]) -> None:
    before = finished[1].read_bytes()
    ran = replay(finished[0], "--samples", "2")
    assert ran.exit_code == 0, ran.output
    lines = [line for line in ran.output.splitlines() if "now" in line]
    assert len(lines) == 4
    assert all(line.endswith(": holds") for line in lines)
    assert finished[1].read_bytes() == before


def test_another_figure_is_found(finished: tuple[str, Path], tmp_path: Path) -> None:
    content = yaml.safe_load(Path(finished[0]).read_text())
    rows = [json.loads(line) for line in finished[1].read_text().splitlines()]
    for row in rows:
        if row["cache"]["name"] == "mine":
            row["records"][0]["kl"] *= 1.2
    (tmp_path / "out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content | {"output": str(tmp_path / "out.jsonl")}))
    ran = replay(str(tmp_path / "c.yaml"), "--cache", "mine", "--benchmark", "more")
    assert ran.exit_code == 1
    [line] = [line for line in ran.output.splitlines() if "now" in line]
    assert "more, mine" in line
    assert line.endswith(": changed")
    assert replay(str(tmp_path / "c.yaml"), "--cache", "fp8").exit_code == 0


def test_rows_that_are_not_there(finished: tuple[str, Path], tmp_path: Path) -> None:
    content = yaml.safe_load(Path(finished[0]).read_text())
    content["caches"].append("turboquant-4bit@sinks=0,recent=8")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    ran = replay(str(tmp_path / "c.yaml"))
    assert ran.exit_code == 1
    assert "error: words, turboquant-4bit@sinks=0,recent=8" in ran.output
    assert "cache='hqq-9'" in str(replay(finished[0], "--cache", "hqq-9").output)


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
        ("ruler", {}, "ruler: data"),
        ("ruler", {"data": "x.jsonl", "task": "sums"}, "task='sums'"),
        ("needle", {"depths": [1.5]}, r"depths\.0=1\.5"),
        ("turns", {"texts": ["a"]}, "texts="),
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
