"""Compiling and loading the C++ code: once per machine, into PyTorch's folder of extensions.

It uses PyTorch's stable C++ interface, threads included, so it compiles in seconds and needs nothing but a compiler.
`torch.utils.cpp_extension.load` would want ninja on the path, and waits for ever for a build that was killed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-DTORCH_TARGET_VERSION=0x020a000000000000")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")


@cache
def problem() -> str | None:
    """Loads the operators, compiling them first if need be; says why where that cannot be."""
    if TorchVersion(torch.__version__) < (2, 10):
        return f"PyTorch {torch.__version__} is older than 2.10"
    try:
        torch.ops.load_library(_library())
    except subprocess.CalledProcessError as error:
        lines = (line for line in error.stderr.splitlines() if "error" in line)
        return f"{error.cmd[0]}: {next(lines, f'exit status {error.returncode}')}"
    except (OSError, ImportError) as error:
        return str(error)
    return None


def operators() -> Any:
    """The operators.

    Raises:
        RuntimeError: the C++ code cannot be compiled or loaded here.
    """
    if reason := problem():
        raise RuntimeError(f"the CPU kernels cannot be had: {reason}")
    return torch.ops.kvcache_compress_cpu


def _library() -> Path:
    from torch.utils import cpp_extension  # Slow to import.

    compiler = shlex.split(cpp_extension.get_cxx_compiler())
    avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    flags = (*_FLAGS, *(_AVX2_FLAGS if avx2 else ()))
    key = hashlib.sha256(repr((torch.__version__, platform.machine(), compiler, flags)).encode())
    for source in sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h")):
        key.update(source.read_bytes())
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    library = folder / f"kvcache_compress_cpu_{key.hexdigest()[:16]}.so"
    if not library.exists():
        logger.info("compiling the CPU kernels into %s", library)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch, library.name)
            command = [*compiler, *flags, *map(str, sorted(_SOURCES.glob("*.cpp"))), "-o", str(built)]
            command += [f"-I{path}" for path in cpp_extension.include_paths()]
            command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            built.replace(library)
    return library
