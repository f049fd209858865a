"""The script that times caches on the CPU, with few tokens."""

import json
from pathlib import Path

import cpu
import pytest
from typer.testing import CliRunner

from kvcache_compress.bench.layers import Shape


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SHAPE", Shape(4, 2, 64))
    monkeypatch.setattr(cpu, "MLP", 64)


def run(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cpu.app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_caches_share_of_a_prompt(tmp_path: Path) -> None:
    """The cache's share is less than the complete prompt, and larger for a compressed cache than for the full one."""
    output = tmp_path / "share.json"
    run("prompt", "--tokens", "1024", "--turns", "2", "--preset", "turboquant-4bit", "--output", str(output))
    full, ours = json.loads(output.read_text())["rows"]
    assert (full["cache"], full["ratio"], ours["cache"]) == ("full", 1, "turboquant-4bit")
    for row in (full, ours):
        assert 0 < row["update_seconds"] < row["seconds"]
        assert row["share"] >= full["share"]
