"""The command line; wrong values end each command with a message and none with a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.models.saved_model import saved_model
from support.models.small_model import small_model
from typer.main import get_command
from typer.testing import CliRunner

import kvcache_compress
from kvcache_compress import preset_names
from kvcache_compress.cache.estimate import MODELS, cache_bytes, constant_bytes, packed_bits, rope_bytes, total_bytes
from kvcache_compress.cli import app
from kvcache_compress.cli.evaluate.app import app as evaluations
from kvcache_compress.config import BUDGETS, load_config, measured_losses
from kvcache_compress.validation import size_text

pytestmark = pytest.mark.usefixtures("offline")
runner = CliRunner(env={"COLUMNS": "200"})


def test_help_does_not_wait_for_torch() -> None:
    """Public names are imported when they are used, so that the command line's help is there at once."""
    code = (
        "import sys, kvcache_compress, kvcache_compress.cli; "
        "assert not {'torch', 'transformers'} & set(sys.modules); "
        "assert set(kvcache_compress.__all__) <= set(dir(kvcache_compress)); "
        "found = [getattr(kvcache_compress, name) for name in kvcache_compress.__all__]; "
        "assert all(callable(each) for each in found) and 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'TurboQuant'"):
        kvcache_compress.TurboQuant  # noqa: B018


@pytest.mark.parametrize("terminal", [{"COLUMNS": "80"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("command", [["presets", "--all"], ["memory", "--all"]], ids=" ".join)
def test_presets_are_listed_unabridged_on_any_terminal(command: list[str], terminal: dict[str, str]) -> None:
    output = runner.invoke(app, command, env=terminal).output
    assert all(name in output for name in preset_names())


def test_recommended_presets_with_their_losses() -> None:
    """Presets by budget come first, with their measured losses, and fit a terminal of 80 columns."""
    result = runner.invoke(app, ["presets"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    places = [result.output.index(f" {name} ") for name in (*BUDGETS, "turboquant-4bit")]
    assert places == sorted(places)
    assert f"{measured_losses()['best-3bit']['kl']:.4f}" in result.output
    assert "turboquant-paper" not in result.output


def test_memory_of_one_preset_in_sensible_units() -> None:
    result = runner.invoke(app, ["memory", "--preset", "best-2bit", "--context", "4K", "--model", "smollm2-135m"])
    assert result.exit_code == 0
    assert "90.00 MiB" in result.output
    assert "turboquant" not in result.output
    command = ["memory", "--preset", "best-2bit", "--context", "4K", "--model", "smollm2-135m", "--batch", "2"]
    expected = size_text(total_bytes(load_config("best-2bit"), 30, 3, 64, 4096, batch=2))
    assert expected in runner.invoke(app, command).output
    result = runner.invoke(app, ["memory", "--preset", "best-9bit"])
    assert (result.exit_code, "did you mean" in result.output) == (1, True)
    assert runner.invoke(app, ["memory", "--context", "long"]).exit_code == 1


def test_memory_of_known_models() -> None:
    """`memory` knows models by name; no folder and no repository of the hub is called so."""
    output = runner.invoke(app, ["memory", "--model", "smollm2-135m"]).output
    assert "smollm2-135m: 30 full-attention layers with 3 key/value heads of 64" in " ".join(output.split())
    assert all(name in runner.invoke(app, ["memory", "--help"]).output for name in MODELS)


def test_doctor_names_the_backend() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "backend" in result.output
    assert "CPU kernels" in result.output


@pytest.mark.parametrize(
    ("problem", "output"),
    [(None, "the CPU kernels are built\n"), ("no c++", "error: the CPU kernels are unavailable: no c++\n")],
)
def test_build_says_what_came_of_it(monkeypatch: pytest.MonkeyPatch, problem: str | None, output: str) -> None:
    monkeypatch.setattr("kvcache_compress.cpu_kernels.build.problem", lambda: problem)
    result = runner.invoke(app, ["build"])
    assert (result.exit_code, result.output) == (int(problem is not None), output)


def test_estimates_by_hand() -> None:
    """Estimates at 4 bits, D = 128 by hand: 64 bytes of codes and 2 of scale per vector; of 1,000 tokens 896 packed."""
    config = load_config("turboquant-4bit")
    assert packed_bits(config, 128) == pytest.approx(8 * 66 / 128)
    per_head = (16 + 64 + 32) * 2 * 128 * 2 + int(896 * (1 + 1 / 32)) * 2 * 66
    assert cache_bytes(config, layers=3, kv_heads=2, head_dim=128, tokens=1000) == 3 * 2 * per_head
    # A rotation, 16 levels and the 256 pairs of them per side; no sinks, so that keys are not centred.
    constants = 3 * 2 * ((128 * 128 + 16) * 4 + 256 * 8)
    assert constant_bytes(config, 3, 2, 128) == constants
    assert total_bytes(config, 3, 2, 128, 1000) == 3 * 2 * per_head + constants


def test_estimates_of_commvq_by_hand() -> None:
    """CommVQ's bytes at 2 bits, D = 64, 30 layers of 3 heads: 11 rounds of 12 bits, 21 of 6, scalars, cos and sin."""
    config = load_config("commvq-2bit")
    per_head = 17 + 16 + 2 + 2
    assert rope_bytes(config, 64, layers=30, tokens=17) == 64 * 2
    assert packed_bits(config, 64, layers=30, kv_heads=3) == pytest.approx(8 * (90 * per_head + 128) / (90 * 128))
    books = 2 * 3 * 64 * 64 * (11 + 21)
    assert constant_bytes(config, 30, 3, 64) == 30 * books
    dense = (16 + 64 + 32) * 90 * 2 * 64 * 2
    assert total_bytes(config, 30, 3, 64, 180, batch=2) == 2 * (dense + 99 * 90 * per_head + 164 * 128) + 30 * books


def test_memory_where_a_preset_does_not_fit(tmp_path: Path) -> None:
    transformers.LlamaConfig(head_dim=80).save_pretrained(tmp_path)
    result = runner.invoke(app, ["memory", "--all", "--model", str(tmp_path)])
    assert result.exit_code == 0
    assert "kivi-2bit: group_size=32" in result.output
    assert "turboquant-4bit" in result.output


def test_memory_counts_full_attention_layers(tmp_path: Path) -> None:
    transformers.Gemma3TextConfig(num_hidden_layers=12).save_pretrained(tmp_path)
    result = runner.invoke(app, ["memory", "--model", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "2 full-attention layers" in result.output
    result = runner.invoke(app, ["memory", "--context", "131072"])
    assert "16.00" in result.output  # GiB of Llama-3.1-8B's bfloat16 cache at 128K


def test_demo_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_compress.bench.demo.PASSAGE_TOKENS", 1500)
    result = runner.invoke(app, ["demo", "--new-tokens", "8", "--model", saved_model()])
    assert result.exit_code == 0, result.output
    assert all(f"│ {name} " in result.output for name in ("full cache", "best-4bit", "best-2bit"))


NUMBERS = ("-1", "9" * 5000, "x", "nan")
DEVICES = ("nodevice", "cuda:99", "cpu:x", "meta", "")
NAMES = ("", "x" * 600, "a\nb", "turboquant-4bit@sinks=99999999999999999999")
NOWHERE = "/nowhere/at/all"


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


ON_FILES = ("compare", "replay")
"""Commands of `eval` that are about a comparison's file."""


def test_files_and_names(folder: Path) -> None:
    paths = [str(path) for path in folder.iterdir() if path.name != "model"]
    for value in (*paths, *NAMES, NOWHERE):
        refused("demo", "--preset", value, "--model", NOWHERE)
        refused("eval", "perplexity", "--cache", value)
        for command in ("memory", "demo"):
            refused(command, "--model", value)
        if value != str(folder / "text.txt"):
            refused("calibrate", "--text", value, "--output", str(folder / "out"), "--model", NOWHERE)
        for command in ON_FILES:
            refused("eval", command, value)
    for value in DEVICES[:-1]:
        refused("calibrate", "--text", paths[0], "--output", str(folder / "out"), "--device", value, "--model", NOWHERE)
        said = refused("eval", "perplexity", "--model", str(folder / "model"), "--device", value)
        assert f"device={value!r} is unavailable: " in said
    for value in ("int8", "float64", ""):
        refused("eval", "perplexity", "--dtype", value, "--model", NOWHERE)
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
