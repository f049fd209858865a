"""Writing results with the circumstances they were measured in: command, commit, versions, hardware."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvcache_compress.files.atomic import whole_file

from .identity import without_folders

_PACKAGES = ("kvcache_compress", "torch", "transformers", "triton", "hqq", "optimum-quanto", "rouge-score")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically; see `whole_file`."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, fields: dict[str, Any], device: torch.device) -> None:
    """Write a result with its circumstances. Lists of numbers take one line each."""
    text = json.dumps(circumstances(device) | fields, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, re.sub(r"\[[-+\d.e,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n")


def command_line() -> str:
    """The command that started this process, without this machine's folders."""
    program = Path(sys.argv[0])
    command = [program.name]
    if program.suffix == ".py":
        command = ["python", "/".join(program.resolve().parts[-2:])]
    return shlex.join([*command, *(without_folders(word) for word in sys.argv[1:])])


def circumstances(device: torch.device) -> dict[str, Any]:
    """Circumstances of a measurement: command, date, commit, versions (None if not installed), hardware."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].strip() if names else cpu
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return {
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {"cpu": cpu, "cores": cores, "threads": threads, "accelerator": accelerator},
    }


def git_commit(file: str = __file__) -> str | None:
    """Commit of a source file's repository, with `-dirty` if files have changed; None outside a repository."""
    here = Path(file).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed copy may lie inside another project's repository, which does not track this file.
        git("ls-files", "--error-unmatch", here.name)
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def error_message(error: Exception) -> str:
    """Error as one line, without this machine's folders."""
    text = without_folders(" ".join(str(error).split())) or type(error).__name__
    memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if memory or "not enough memory" in text or "can't allocate memory" in text:
        return f"out of memory: {text}"
    return text if isinstance(error, (ValueError, OSError, ImportError)) else f"{type(error).__name__}: {text}"
