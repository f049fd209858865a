"""Safetensors files that belong to one model: codebooks, statistics and saved caches.

Metadata, all strings: `kind` of the file, `version` of the kind's format, `header` (JSON: the `ModelFacts` as `model`,
and what the kind adds), and `sha256` of the header and of all tensors.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import isfile
from pathlib import Path, PurePath
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvcache_compress.validation import shortened

from .atomic import is_replaceable, whole_file

_LONGEST_PROBLEM = 600
"""Characters of an error message, which may quote a file's contents."""


class ModelFacts(BaseModel):
    """Identity of the model that a file was made for: its id or path, type and sizes.

    `rope` has the config's RoPE parameters and the pairing of channels; it is empty for a model without RoPE.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    model_type: str
    head_dim: int
    kv_heads: int
    layers: int
    rope: dict[str, Any]

    def mismatch(self, here: "ModelFacts", *, rope: bool = True, any_model: bool = False) -> str | None:
        """The reason why a file with these facts cannot serve the model `here`, or None.

        Dimensions and, if `rope`, RoPE must agree in any case. Names agree if they are equal or, as for folders, if the
        last two parts of the path are; an unnamed model agrees with all. `any_model` ignores names and types.
        """
        start = f"made for {self.name or self.model_type!r}, not for {here.name or f'this {here.model_type}'!r}"
        names = ["head_dim", "kv_heads", "layers", *(["rope"] if rope else []), *([] if any_model else ["model_type"])]
        differing = [name for name in names if getattr(self, name) != getattr(here, name)]
        if differing:
            words = (f"{name} {getattr(self, name)} in the file, {getattr(here, name)} here" for name in differing)
            return f"{start}: {'; '.join(words)}"
        parts = [PurePath(name).parts for name in (self.name, here.name)]
        count = min(2, *map(len, parts))
        if not any_model and count and parts[0][-count:] != parts[1][-count:]:
            return f"{start}. If both have the same weights, set any_model to true"
        return None


@dataclass(frozen=True)
class ModelFile:
    """Checked file of one model: its header, and the shapes of its tensors.

    what: beginning of error messages, such as `statistics='x.safetensors' for spectral`.
    """

    path: str
    what: str
    facts: ModelFacts = field(hash=False)
    header: Mapping[str, Any] = field(hash=False)
    """Entries of the header besides the facts, which depend on the kind of file."""
    shapes: Mapping[str, tuple[int, ...]] = field(hash=False)

    @classmethod
    def open(cls, path: str, what: str, kind: str, version: int, advice: str = "") -> Self:
        """Check a file and read its header, once as long as the file does not change."""
        file = Path(path).expanduser()
        if not isfile(file):
            raise ValueError(f"{what}: no such file. {advice}")
        stat = file.stat()
        return cls(**vars(_open(str(file), what, kind, version, stat.st_mtime_ns, stat.st_size)))

    def refusal(self, problem: str) -> ValueError:
        return _refusal(self.what, problem)

    def check_model(self, here: ModelFacts, *, rope: bool = True, any_model: bool = False) -> None:
        """Raise `ValueError` if the file was made for another model; see `ModelFacts.mismatch`."""
        if problem := self.facts.mismatch(here, rope=rope, any_model=any_model):
            raise self.refusal(problem)

    def local_heads(self, heads: int, head_dim: int) -> slice:
        """Heads of the file that a layer with `heads` heads holds: all or, under tensor parallelism, a process's share.

        Transformers gives each of a model's n processes a contiguous run of key/value heads, in rank order. Tensor
        parallelism is the mesh's innermost dimension, so data-parallel copies repeat this every n ranks.
        """
        held, (rank, processes) = self.facts.kv_heads, process_rank()
        shares, rest = divmod(held, heads)
        if self.facts.head_dim != head_dim or rest or not shares or processes % shares:
            raise self.refusal(
                f"made for {held} heads of {self.facts.head_dim}, not {heads} of {head_dim} in each of {processes} "
                "processes"
            )
        first = rank % shares * heads
        return slice(first, first + heads)

    def load(self, prefix: str, device: torch.device) -> dict[str, torch.Tensor]:
        """Tensors whose names begin with `prefix`, by the rest. Raises `ValueError` for one that is not finite."""
        try:
            with safe_open(self.path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in self.shapes if name.startswith(prefix)}
        except (SafetensorError, OSError) as error:
            raise self.refusal(f"cannot be read: {error}") from None
        if broken := not_finite(tensors):
            raise self.refusal(f"damaged: {broken} holds NaN or infinity")
        return {name.removeprefix(prefix): tensor.to(device) for name, tensor in tensors.items()}


@lru_cache(maxsize=8)
def _open(path: str, what: str, kind: str, version: int, changed: int, size: int) -> ModelFile:
    return read_model_file(path, what, kind, version)[0]


def read_model_file(path: str, what: str, kind: str, version: int) -> tuple[ModelFile, dict[str, torch.Tensor]]:
    """Read and check a whole file, and return its header and its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise _refusal(what, f"damaged, or not a safetensors file: {error}") from None
    except OSError as error:
        raise _refusal(what, f"{str(path)!r} cannot be read: {error}") from None
    if metadata.get("kind") != f"kvcache_compress.{kind}":
        raise _refusal(what, f"not a kvcache-compress file of {kind}")
    if metadata.get("version") != str(version):
        raise _refusal(what, f"has format version {metadata.get('version')!r}, but this release reads {str(version)!r}")
    text = metadata.get("header", "")
    if checksum(text, tensors) != metadata.get("sha256"):
        raise _refusal(what, "damaged: its contents do not match its checksum")
    try:
        header = json.loads(text)
        facts = ModelFacts(**header.pop("model"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _refusal(what, f"damaged: its header names no model ({error})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ModelFile(path, what, facts, header, shapes), tensors


def write_model_file(
    path: str | Path, kind: str, version: int, facts: ModelFacts, tensors: Mapping[str, torch.Tensor], **header: Any
) -> None:
    """Write contiguous CPU tensors and a header; an existing file is replaced only once all is written."""
    text = json.dumps({"model": facts.model_dump(), **header}, default=str)
    metadata = {"kind": f"kvcache_compress.{kind}", "version": str(version), "header": text}
    metadata["sha256"] = checksum(text, tensors)
    try:
        with whole_file(path) as unfinished:
            save_file(dict(tensors), unfinished, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{str(path)!r} could not be written: {error}") from None


def check_output(output: Path) -> None:
    """Raise `ValueError` if a file of tensors cannot be written here."""
    problem = None
    if output.suffix != ".safetensors":
        problem = "must be a file that ends in .safetensors"
    elif output.is_dir():
        problem = "is a folder; pass the name of a file"
    elif not is_replaceable(output):
        problem = "is a device or a pipe; pass a file that can be replaced"
    else:
        folder = next(folder for folder in output.absolute().parents if folder.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            problem = f"must be in a writable folder, which {str(folder)!r} is not"
    if problem:
        raise ValueError(f"output={str(output)!r} {problem}")


def checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a header and of the names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor with NaN or infinity, or None."""
    floats = (name for name, tensor in tensors.items() if tensor.is_floating_point())
    return next((name for name in floats if not tensors[name].isfinite().all()), None)


def process_rank() -> tuple[int, int]:
    """Rank of this process, and number of processes that work together."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _refusal(what: str, problem: str) -> ValueError:
    return ValueError(f"{what}: {shortened(' '.join(problem.split()), _LONGEST_PROBLEM)}")
