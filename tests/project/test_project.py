"""Packaging: one top-level package, a core without extras, agreeing versions; and the example runs."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.models.saved_model import saved_model
from support.paths import ROOT

from kvcache_compress.methods import registry
from kvcache_compress.modeling import loading

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BLOCKED = """
import json, sys
for name in ("datasets", "jieba", "jinja2", "matplotlib", "rapidfuzz", "rouge_score", "gguf", "lm_eval",
             "hqq", "optimum"):
    sys.modules[name] = None  # as if it were not installed
from typer.testing import CliRunner
from kvcache_compress.cli import app
ran = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.exit_code, one.stdout, one.stderr) for one in ran]))
"""


@pytest.mark.slow
def test_wheel_has_one_top_level_name(tmp_path: Path) -> None:
    """The wheel, built from the sdist, has one top-level name: an `eval` would shadow other projects' packages."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvcache_compress"}
    expected = (
        "py.typed", "configs/turboquant-4bit.yaml", "triton_kernels/attention/kernel.py",
        "cpu_kernels/attention/attend.cpp", "cpu_kernels/attention/softmax.h", "eval/tasks/data/default_text.txt",
        "eval/tasks/longbench/prompts.yaml",
    )  # fmt: skip
    assert all(f"kvcache_compress/{name}" in names for name in expected)


def test_every_folder_with_modules_is_a_package_of_the_wheel() -> None:
    """A new package that is missing from the list would work in a checkout, and nowhere else."""
    setuptools = PROJECT["tool"]["setuptools"]
    mapped = [name for name in setuptools["package-dir"].values() if name != "configs"]
    folders = {path.parent.relative_to(ROOT) for top in mapped for path in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.parts).removeprefix("kvcache_compress.") for folder in folders} - {"kvcache_compress"}
    expected = {"kvcache_compress", "kvcache_compress.configs", *(f"kvcache_compress.{name}" for name in names)}
    assert sorted(setuptools["packages"]) == sorted(expected)


def test_mapped_folders_refuse_another_name() -> None:
    for folder in ("triton_kernels", "cpu_kernels"):
        done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0
        assert f"installed as kvcache_compress.{folder}" in done.stderr


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_oldest_versions_are_those_of_the_metadata() -> None:
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["gguf"]]
    least = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(wanted), flags=re.MULTILINE))
    found = pins(ROOT / ".github" / "oldest.txt")
    assert found.keys() == least.keys() - {"triton"}, "torch brings its own triton"
    assert all(f"{found[name]}.".startswith(f"{least[name]}.") for name in found)


def test_core_runs_without_extras() -> None:
    commands = [
        (["presets"], "best-3bit", ""),
        (["memory", "--preset", "best-3bit"], "best-3bit", ""),
        (["eval", "--help"], "", ""),
        (["doctor"], "", ""),
        (["eval", "perplexity", "--cache", "hqq-4"], "", "hqq"),
    ]
    given = json.dumps([words for words, _, _ in commands])
    done = subprocess.run([sys.executable, "-c", BLOCKED, given], capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    for (_, shown, package), (code, output, errors) in zip(commands, found, strict=True):
        assert code == bool(package), errors
        assert shown in output
        if package:
            assert errors.startswith("error: ")
            assert f'need {package}: pip install "kvcache-compress[peers]"' in errors
            assert errors.count("\n") == 1


def test_a_method_of_ones_own(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The example packs tokens of a small model in place of SmolLM2."""
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda _: load(saved_model(8)))
    monkeypatch.setattr(registry, "_CODECS", {k: v for k, v in registry._CODECS.items() if k != "rounding"})
    runpy.run_path(str(ROOT / "examples" / "own_method.py"), run_name="__main__")
    packed = re.search(r"(\d+) of \d+ tokens packed", capfd.readouterr().out.replace(",", ""))
    assert packed is not None
    assert int(packed[1]) > 0
