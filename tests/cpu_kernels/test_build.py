"""Compiling the C++ code, and what happens where that cannot be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_model import method_config, small_model

from kvcache_compress import CompressedCache, backend
from kvcache_compress.cpu_kernels import build
from kvcache_compress.registry import get_method


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing compiled, and nothing known of that. No test may load the code then: a process can do so but once."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build.problem.cache_clear()
    backend._cpp_problem.cache_clear()
    yield
    build.problem.cache_clear()
    backend._cpp_problem.cache_clear()


@pytest.mark.usefixtures("built", "anew")
def test_compiles_once(tmp_path: Path) -> None:
    library = build._library()
    assert [path.name for path in tmp_path.iterdir()] == [library.name]
    written = library.stat().st_mtime_ns
    assert build._library() == library
    assert library.stat().st_mtime_ns == written


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "no-such-compiler"), ("false", "false: exit status 1"), ("c++ -DINF=", "error: ")],
)
def test_without_a_compiler(
    compiler: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An explicit choice is refused; `auto` says why and runs in torch."""
    monkeypatch.setenv("CXX", compiler)
    model = small_model()
    with pytest.raises(ValueError, match=f'backend="cpp" cannot be had: .*{message}'):
        CompressedCache(model.config, {**method_config("turboquant"), "backend": "cpp"})
    cache = CompressedCache(model.config, method_config("turboquant"))
    x = torch.randn(1, 2, 20, 32)
    with caplog.at_level(logging.WARNING, "kvcache_compress"):
        cache.update(x, x, 0)
        cache.update(x, x, 1)
    assert [layer.backend for layer in cache.layers] == ["torch", "torch"]
    assert caplog.text.count("no C++ code") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("anew")
def test_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "file" in str(build.problem())


@pytest.mark.usefixtures("anew")
def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert build.problem() == "PyTorch 2.9.1 is older than 2.10"


@pytest.mark.usefixtures("built")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="that is what all tests here run")
def test_without_vector_extensions() -> None:
    """The code for other processors, in a process of its own."""
    chosen = "((6-bit or polar or kivi-3 or commvq) and equals) or (test_encode and not alike and not caches)"
    tests = [str(Path(__file__).with_name(name)) for name in ("test_attention.py", "test_encode.py")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *tests, "-k", chosen]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout


@pytest.mark.usefixtures("built")
def test_method_without_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new one is at first: an explicit choice is refused, and `auto` takes torch."""
    monkeypatch.setattr(get_method("qjl"), "on_cpp", False)
    config, model = method_config("qjl"), small_model()
    with pytest.raises(ValueError, match="backend=\"cpp\" cannot be had for method 'qjl'"):
        CompressedCache(model.config, {**config, "backend": "cpp"})
    cache, x = CompressedCache(model.config, config), torch.randn(1, 2, 20, 32)
    cache.update(x, x, 0)
    assert cache.layers[0].backend == "torch"
