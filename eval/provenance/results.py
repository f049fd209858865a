"""Writing results with the circumstances they were measured in, and digests that identify model and options."""

import contextlib
import datetime
import hashlib
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
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from kvcache_compress.files.atomic import whole_file

_PACKAGES = ("kvcache_compress", "torch", "transformers", "triton", "hqq", "optimum-quanto", "rouge-score")
_NUMBERS = 16
_ABSOLUTE = re.compile(r"(?<![\w:/.])(?:/[^\s/:;,'\"()\[\]{}=]+){2,}")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically; see `whole_file`."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, fields: dict[str, Any], device: torch.device) -> None:
    """Write a result with its circumstances."""
    text = json.dumps(circumstances(device) | fields, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n")


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


def digest_of(**parts: Any) -> str:
    """Short digest of plain JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint(model: PreTrainedModel) -> str:
    """Short digest of a model's weights: names, shapes, and a few numbers of each parameter, as float32."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = torch.arange(min(_NUMBERS, flat.numel())) * (flat.numel() - 1) // (_NUMBERS - 1)
        numbers = flat[some.to(flat.device)].float().cpu()
        digest.update(f"{name}{tuple(parameter.shape)}".encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


def without_folders(text: str) -> str:
    """Cut absolute paths in a text to their last two parts."""
    return _ABSOLUTE.sub(lambda path: "/".join(path[0].split("/")[-2:]), text)


def strip_folders(option: Any) -> Any:
    """Apply `without_folders` to every text in plain JSON."""
    return tree_map_only(str, without_folders, option)
