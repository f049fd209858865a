"""Packaging: the wheel installs one top-level package, with the repository's other folders inside it."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.slow
def test_wheel_has_one_top_level_name(tmp_path: Path) -> None:
    """The wheel has one top-level name: a `triton_kernels` or `eval` would shadow other projects' packages."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kvcache_compress"}
    expected = (
        "py.typed",
        "configs/turboquant-4bit.yaml",
        "triton_kernels/attention/kernel.py",
        "triton_kernels/attention/tiles.json",
        "cpu_kernels/attention/attend.cpp",
        "cpu_kernels/attention/softmax.h",
        "eval/tasks/default_text.txt",
        "eval/reporting/report.html.j2",
        "eval/tasks/longbench/prompts.yaml",
    )
    assert all(f"kvcache_compress/{name}" in names for name in expected)


def test_every_folder_with_modules_is_a_package_of_the_wheel() -> None:
    """A new room that is missing from the list of packages would work in a checkout, and nowhere else."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    mapped = [name for name in setuptools["package-dir"].values() if name != "configs"]
    folders = {path.parent.relative_to(ROOT) for top in mapped for path in (ROOT / top).rglob("*.py")}
    names = {".".join(folder.parts).removeprefix("kvcache_compress.") for folder in folders} - {"kvcache_compress"}
    expected = {"kvcache_compress", "kvcache_compress.configs", *(f"kvcache_compress.{name}" for name in names)}
    assert sorted(setuptools["packages"]) == sorted(expected)


@pytest.mark.parametrize("folder", ["triton_kernels", "cpu_kernels"])
def test_the_folder_refuses_another_name(folder: str) -> None:
    """A mapped folder imported under its own name from the repository's root raises a clear `ImportError`."""
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"installed as kvcache_compress.{folder}" in done.stderr


def test_imports_by_name_go_one_way_too() -> None:
    """import-linter does not see names like `"attention.tiled"`; `codecs.backend` alone hands out rooms above it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["containers"] == ["kvcache_compress"])
    height = {room: -level for level, layer in enumerate(layers) for room in layer.split(" | ")}
    names = re.compile(rf'f?"({"|".join(height)})\.\w+\.?[\w{{}}.]*"')
    folders = {"kvcache_compress": (), "triton_kernels": ("triton_kernels",), "cpu_kernels": ("cpu_kernels",)}
    loaded = []
    for folder, prefix in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            room = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)[0]
            if room == "__init__":
                continue  # the package itself is above all rooms
            found = names.findall(path.read_text(encoding="utf-8"))
            loaded += [(path.name, height[room] - height[name]) for name in found]
    assert len(loaded) > 10
    assert {name for name, rise in loaded if rise < 0} == {"backend.py"}
