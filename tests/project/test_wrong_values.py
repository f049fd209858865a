"""Command lines with wrong values: each ends with a message and none with a traceback."""

from pathlib import Path

import pytest
from support.models.small_model import small_model
from typer.main import get_command
from typer.testing import CliRunner

from kvcache_compress.cli import app
from kvcache_compress.cli.evaluate.app import app as evaluations

NUMBERS = ("-1", "9" * 5000, "x", "nan")
DEVICES = ("nodevice", "cuda:99", "cpu:x", "meta", "")
NAMES = ("", "x" * 600, "a\nb", "turboquant-4bit@sinks=99999999999999999999")
NOWHERE = "/nowhere/at/all"
pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with unreadable files, a text and a model."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "folder").mkdir()
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.yaml").write_text("")
    (folder / "broken.yaml").write_text("keys: [")
    (folder / "text.txt").write_text("some words " * 100)
    small_model().save_pretrained(folder / "model")
    return folder


def refused(*arguments: str) -> str:
    """Run a command that must fail, and return its message, which has no traceback and is not overlong."""
    runner = CliRunner(env={"COLUMNS": "200"})
    ran = runner.invoke(app, [*arguments])
    assert ran.exit_code in (1, 2), ran.output
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    assert "Traceback" not in ran.output
    typed = sum(map(len, arguments))
    assert len(ran.output) < 4000 + 3 * typed
    return " ".join(ran.output.split())


ON_FILES = ("compare", "replay", "report")
"""Commands of `eval` that are about a comparison's file."""


def test_files_and_names(folder: Path) -> None:
    paths = [str(path) for path in folder.iterdir() if path.name != "model"]
    for value in (*paths, *NAMES, NOWHERE):
        refused("demo", "--preset", value, "--model", NOWHERE)
        refused("eval", "perplexity", "--cache", value)
        refused("bench", "--preset", value, "--device", "cpu", "--tokens", "16")
        for command in ("memory", "bench", "demo"):
            refused(command, "--model", value)
        if value != str(folder / "text.txt"):
            refused("calibrate", "--text", value, "--output", str(folder / "out"), "--model", NOWHERE)
        for command in ON_FILES:
            refused("eval", command, value)
    for value in DEVICES[:-1]:
        refused("calibrate", "--text", paths[0], "--output", str(folder / "out"), "--device", value, "--model", NOWHERE)
        assert f"device={value!r}" in refused("bench", "--device", value)
        said = refused("eval", "perplexity", "--model", str(folder / "model"), "--device", value)
        assert f"device={value!r} is unavailable: " in said
    for value in ("int8", "float64", ""):
        refused("bench", "--dtype", value)
        refused("eval", "perplexity", "--dtype", value, "--model", NOWHERE)
    assert f"no folder '{NOWHERE}'" in refused("bench", "--output", f"{NOWHERE}/bench.json")
    assert "did you mean 'turboquant-4bit'" in refused("demo", "--preset", "turboquant-4bits")
    for command in ("presets", "doctor", "memory", "nothing"):
        refused(command, "more")


COMMANDS = {name: command for name, command in get_command(evaluations).commands.items() if name not in ON_FILES}


@pytest.mark.parametrize("kind", COMMANDS)
def test_evaluations(kind: str, folder: Path) -> None:
    text = str(folder / "text.txt")
    needed = {"ruler": ["--data", text], "turns": ["--text", text, "--text", text]}.get(kind, [])
    found = 0
    for option in COMMANDS[kind].params:
        if option.is_flag:
            continue
        wanted = str(option.type_descriptor.annotation)
        values: tuple[str, ...] = NAMES
        if "int" in wanted or "float" in wanted:
            values = NUMBERS
        elif "Path" in wanted:
            values = (str(folder / "folder"), str(folder / "bytes.yaml"), str(folder / "new"), "x" * 6000)
        for value in values:
            refused("eval", kind, *needed, "--model", NOWHERE, option.opts[0], value)
            found += 1
    assert found > 30
