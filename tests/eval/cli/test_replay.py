"""Rows of a finished comparison, measured again."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.models.small_model import method_config, small_model
from support.models.toy_tokenizers import word_tokenizer
from typer.testing import CliRunner

from kvcache_compress.cli.evaluate.app import app

WORDS = [f"w{index:02d}" for index in range(64)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A finished comparison: its YAML file and its results."""
    folder = tmp_path_factory.mktemp("comparison")
    small_model().save_pretrained(folder / "model")
    word_tokenizer(WORDS, pad_token="w00", unk_token="w01").save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(WORDS[index * index % 61] for index in range(1000)))
    words = {"kind": "perplexity", "texts": [str(folder / "text.txt")], "prefix": 100, "scored": 16, "windows": 3}
    caches = ["fp8", {"name": "mine", "config": method_config("turboquant")}]
    content = {"models": [str(folder / "model")], "caches": caches, "benchmarks": {"words": words, "more": words}}
    (folder / "c.yaml").write_text(yaml.safe_dump(content | {"output": str(folder / "out.jsonl")}))
    ran = CliRunner().invoke(app, ["compare", str(folder / "c.yaml")])
    assert ran.exit_code == 0, ran.output
    return str(folder / "c.yaml"), folder / "out.jsonl"


def replay(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_figures_hold(files: tuple[str, Path]) -> None:
    before = files[1].read_bytes()
    ran = replay(files[0], "--samples", "2")
    assert ran.exit_code == 0, ran.output
    lines = [line for line in ran.output.splitlines() if "now" in line]
    assert len(lines) == 4
    assert all(line.endswith(": holds") for line in lines)
    assert files[1].read_bytes() == before


def test_another_figure_is_found(files: tuple[str, Path], tmp_path: Path) -> None:
    content = yaml.safe_load(Path(files[0]).read_text())
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
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


def test_rows_that_are_not_there(files: tuple[str, Path], tmp_path: Path) -> None:
    content = yaml.safe_load(Path(files[0]).read_text())
    content["caches"].append("turboquant-4bit@sinks=0,recent=8")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    ran = replay(str(tmp_path / "c.yaml"))
    assert ran.exit_code == 1
    assert "error: words, turboquant-4bit@sinks=0,recent=8" in ran.output
    assert "cache='hqq-9'" in str(replay(files[0], "--cache", "hqq-9").output)
