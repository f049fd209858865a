"""Compile and load the C++ code, and fall back or refuse if that fails."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.models.small_model import method_config, small_model
from support.paths import ROOT

from kvcache_compress import CompressedCache
from kvcache_compress.backends import cpp
from kvcache_compress.cpu_kernels import build


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Empty build folder and forgotten state. Tests must not load the code then: a process can only do so once."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build.problem.cache_clear()
    cpp._warn_once.cache_clear()
    yield
    build.problem.cache_clear()
    cpp._warn_once.cache_clear()


@pytest.fixture
def compiler(built: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Fake compiler that copies this process's library, and its log with a line per call."""
    compiled = next(path for path in torch.ops.loaded_libraries if "kvcache_compress_cpu" in str(path))
    (tmp_path / "log").touch()
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho x >> {tmp_path}/log\nwhile [ "$1" != -o ]; do shift; done\ncp "{compiled}" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "folder"))
    return tmp_path / "log"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the libraries that would have been loaded."""
    paths: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    return paths


@pytest.mark.usefixtures("built", "anew")
def test_compiles_once(compiler: Path, loaded: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """With a fake compiler; `built` has compiled these sources, here or in an earlier run."""
    assert not build.built()
    with caplog.at_level(logging.WARNING):
        assert build.problem() is None
    assert caplog.text.count("compiling the CPU kernels, once") == 1
    assert build.built()
    build.problem.cache_clear()
    assert build.built(), "by what an earlier process left"
    (library,) = (compiler.parent / "folder").iterdir()
    written = library.stat().st_mtime_ns
    build._load()
    assert loaded == [library, library]
    assert library.stat().st_mtime_ns == written
    assert compiler.read_text() == "x\n"


def test_a_library_of_another_machine(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def load(path: Path) -> None:
        tried.append(path)
        if len(tried) < 3:
            raise OSError("GLIBC_9.99 not found")

    monkeypatch.setattr(torch.ops, "load_library", load)
    with pytest.raises(OSError, match="GLIBC"):
        build._load()
    build._load()
    assert len(tried) == 3
    assert compiler.read_text() == "x\nx\n"


def test_two_at_once(compiler: Path, loaded: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: build._load(), range(4)))
    assert len(loaded) == 4
    assert list(loaded[0].parent.iterdir()) == [loaded[0]]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "no-such-compiler"), ("false", "false: exit status 1"),
        ('c++ "', "CXX='c\\+\\+ \"': No closing quotation"), (" ", "CXX=' ': no compiler"),
        ("true", "true produced no library"), ("/", "Permission denied: '/'"),
    ],
)  # fmt: skip
def test_without_a_compiler(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    model = small_model()
    with pytest.raises(ValueError, match=f'backend="cpp" is unavailable: .*{message}'):
        CompressedCache(model.config, {**method_config("turboquant"), "backend": "cpp"})
    cache = CompressedCache(model.config, method_config("turboquant"))
    x = torch.randn(1, 2, 20, 32)
    with caplog.at_level(logging.WARNING, "kvcache_compress"):
        cache.update(x, x, 0)
        cache.update(x, x, 1)
    assert [layer.backend.name for layer in cache.layers] == ["torch", "torch"]
    assert caplog.text.count("C++ kernels are unavailable") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("anew")
def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert build.problem() == "PyTorch 2.9.1 is older than 2.10"
    assert not build.built()


@pytest.mark.usefixtures("built")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="that is what all tests here run")
def test_without_vector_extensions() -> None:
    """The code for processors without AVX2, in a separate process."""
    chosen = "((6-bit or polar or kivi-3 or commvq) and equals) or (test_encode and not alike and not caches)"
    tests = [str(Path(__file__).with_name(name)) for name in ("test_attention.py", "test_encode.py")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *tests, "-k", chosen]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout
