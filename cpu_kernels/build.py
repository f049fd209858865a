"""Compile and load the C++ code, once per machine, into PyTorch's folder of extensions.

The code uses PyTorch's stable C++ interface, threads included, so it compiles in seconds and needs only a compiler.
`torch.utils.cpp_extension.load` would need ninja on the path, and waits forever for a build that was killed.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from kvcache_compress.files.atomic import whole_file

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_VECTOR_FLAGS = {"AVX2": _AVX2_FLAGS, "AVX512": (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")}
"""Flags by the vector instructions that PyTorch finds; results are the same to the bit."""


@cache
def problem() -> str | None:
    """Load the operators, compiling them if needed; None, or the reason why they are unavailable."""
    if TorchVersion(torch.__version__) < (2, 10):
        return f"PyTorch {torch.__version__} is older than 2.10"
    try:
        _load()
    except subprocess.CalledProcessError as error:
        lines = (line for line in error.stderr.splitlines() if "error" in line)
        return f"{error.cmd[0]}: {next(lines, f'exit status {error.returncode}')}"
    except (OSError, ImportError) as error:
        return str(error)
    return None


def operators() -> Any:
    """The C++ operators, compiled and loaded on first use; raises `RuntimeError` where that is impossible."""
    if reason := problem():
        raise RuntimeError(f"the CPU kernels are unavailable: {reason}")
    return torch.ops.kvcache_compress_cpu


def built() -> bool:
    """True if the operators need not be compiled any more."""
    if problem.cache_info().currsize:
        return problem() is None
    try:
        return _library().is_file()
    except OSError:
        return False


def _load() -> None:
    """Load the library from an earlier build, or compile a new one."""
    library = _library()
    if library.is_file():
        # It may belong to a machine with the same home but other system libraries.
        with contextlib.suppress(OSError):
            torch.ops.load_library(library)
            return
    logger.warning("compiling the CPU kernels, once for this version on this machine: 20 to 60 seconds")
    with whole_file(library) as unfinished:  # loading a file that is cut short would kill Python with SIGBUS
        _compile(unfinished)
    torch.ops.load_library(library)


def _library() -> Path:
    """Path of the library, whose name hashes sources, compiler, flags and versions."""
    from torch.utils import cpp_extension  # Slow to import.

    key = hashlib.sha256(repr((torch.__version__, platform.machine(), _command())).encode())
    for source in sorted(path for path in _SOURCES.rglob("*") if path.suffix in (".cpp", ".h")):
        key.update(source.read_bytes())
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return folder / f"kvcache_compress_cpu_{key.hexdigest()[:16]}.so"


def _command() -> list[str]:
    """Compiler and flags, as words of a command."""
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    try:
        words = shlex.split(compiler)
    except ValueError as error:
        raise OSError(f"CXX={compiler!r}: {error}") from None
    if not words:
        raise OSError(f"CXX={compiler!r}: no compiler")
    return [*words, *_FLAGS, *_VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension

    command = _command()
    paths = [f"-I{path}" for path in (_SOURCES, *cpp_extension.include_paths())]
    paths += [f"-L{path}" for path in cpp_extension.library_paths()]
    sources = map(str, sorted(_SOURCES.rglob("*.cpp")))
    full_command = [*command, *sources, "-o", str(library), *paths, "-ltorch_cpu", "-lc10"]
    subprocess.run(full_command, check=True, capture_output=True, text=True, errors="replace")
    if not library.stat().st_size:
        raise OSError(f"{command[0]} produced no library")
