"""Tensors that belong to one model, in a file: written by calibration, read and checked by a method's codec.

Metadata (all strings): `format`, `version`, `model` (hub id or path), `model_type`, `head_dim`, `kv_heads`, `layers`,
`sha256` of the tensors, and as JSON `rope` (`rope_record`; empty for a model without RoPE) and what the method adds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.files.tensors import open_tensors, write_tensors
from kvcache_compress.files.text import is_file
from kvcache_compress.validation.messages import on_one_line

from .facts import head_shape, rope_record, same_model
from .rope import rope_layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelFacts:
    """The model that a file was made for."""

    model: str
    model_type: str
    head_dim: int
    kv_heads: int
    layers: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelFacts:
        head_dim, kv_heads, layers = head_shape(config)
        layout = rope_layout(config, head_dim)
        rope = {} if layout is None else rope_record(config, layout)
        return cls(config._name_or_path, config.model_type, head_dim, kv_heads, layers, rope)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> ModelFacts:
        """Parse metadata; raises `KeyError` or `ValueError` if a fact is missing or damaged."""
        numbers: dict[str, Any] = {name: int(metadata[name]) for name in ("head_dim", "kv_heads", "layers")}
        rope = json.loads(metadata["rope"])
        if not isinstance(rope, dict):
            raise ValueError("rope is no mapping")
        return cls(model=metadata["model"], model_type=metadata["model_type"], rope=rope, **numbers)

    def metadata(self) -> dict[str, str]:
        numbers = {name: str(getattr(self, name)) for name in ("head_dim", "kv_heads", "layers")}
        return {"model": self.model, "model_type": self.model_type, **numbers, "rope": json.dumps(self.rope)}

    def local_heads(self, heads: int, head_dim: int) -> slice:
        """Heads of the file that a layer with `heads` heads holds: all or, under tensor parallelism, a process's share.

        Transformers splits the key/value heads into runs, in the order of the ranks of the n processes that share a
        model. n is the fastest dimension of its device mesh, so ranks continue through data-parallel copies.

        Raises:
            ValueError: The layer's heads are no such share.
        """
        shares, rest = divmod(self.kv_heads, heads)
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        processes = torch.distributed.get_world_size() if together else 1
        if self.head_dim != head_dim or rest or not shares or processes % shares:
            raise ValueError(
                f"made for {self.kv_heads} heads of {self.head_dim}, not {heads} of {head_dim} in each of {processes} "
                "processes"
            )
        first = torch.distributed.get_rank() % shares * heads if shares > 1 else 0
        return slice(first, first + heads)

    def mismatch(self, config: PreTrainedConfig, *, rope: bool, any_model: bool) -> str | None:
        """The reason why a file with these facts cannot serve a model, or None.

        Dimensions and, if `rope`, RoPE must agree in any case. Model ids agree if they are equal or, as for folders, if
        the last two parts of the path are; an unnamed model agrees with all. `any_model` ignores the ids.
        """
        here = head_shape(config)
        name = config._name_or_path or f"this {config.model_type}"
        start = f"made for {self.model or self.model_type!r}, not for {name!r}"
        in_file = (self.head_dim, self.kv_heads, self.layers)
        if in_file != here:
            words = "{} layers with {} key/value heads of {}"
            return f"{start}: {words.format(*in_file[::-1])}, not {words.format(*here[::-1])}"
        if rope and (record := ModelFacts.of(config).rope) != self.rope:
            differing = sorted(key for key in record | self.rope if record.get(key) != self.rope.get(key))
            words = "; ".join(
                f"{key} {self.rope.get(key)} in the file, {record.get(key)} in the model" for key in differing
            )
            return f"{start}: other rotary position embeddings: {words}"
        if not any_model and self.model_type != config.model_type:
            return f"{start}: a model of type {self.model_type!r}, not {config.model_type!r}"
        if not any_model and not same_model(self.model, config._name_or_path):
            return f"{start}. If both are the same model, set any_model: true"
        return None


@dataclass(frozen=True)
class ModelFile:
    """Checked header of a file: its metadata and the shapes of its tensors.

    what: beginning of error messages, such as `statistics='x.safetensors' for spectral`.
    """

    path: str
    what: str
    facts: ModelFacts = field(hash=False)
    metadata: Mapping[str, str] = field(hash=False)
    shapes: Mapping[str, tuple[int, ...]] = field(hash=False)
    dtypes: frozenset[str]
    """As safetensors names them: `F16`, `F32`."""

    def refusal(self, problem: str) -> ValueError:
        return ValueError(f"{self.what}: {on_one_line(problem, 600)}")

    def described(self, name: str) -> Any:
        """An entry that the method added to the metadata. Raises `ValueError` for one that is missing or damaged."""
        try:
            return json.loads(self.metadata[name])
        except (KeyError, ValueError, RecursionError) as error:
            raise self.refusal(f"its metadata is damaged ({error})") from None

    def load(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """Tensors by name. Raises `ValueError` for one that is missing or not finite."""
        with open_tensors(self.path, self.what) as file:
            tensors = {}
            for name in names:
                if name not in self.shapes:
                    raise self.refusal(f"it holds no {name}")
                tensors[name] = file.get_tensor(name)
                if not tensors[name].isfinite().all():
                    raise self.refusal(f"damaged: {name} holds NaN or infinity")
        return {name: tensor.to(device) for name, tensor in tensors.items()}


def write_model_file(
    path: str | Path, form: str, version: str, facts: ModelFacts, tensors: Mapping[str, torch.Tensor], **described: Any
) -> None:
    """Write contiguous CPU tensors with metadata; an existing file is replaced only once all is written."""
    metadata = {"format": form, "version": version, **facts.metadata()}
    metadata |= {name: json.dumps(value) for name, value in described.items()}
    write_tensors(path, tensors, metadata | {"sha256": digest(tensors.keys(), tensors.__getitem__)})


def digest(names: Iterable[str], tensor: Callable[[str], torch.Tensor]) -> str:
    """SHA-256 of the names and bytes of all tensors, in order of their names."""
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(name.encode())
        found.update(tensor(name).reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def open_model_file(path: str, what: str, form: str, version: str, kind: str, advice: str) -> ModelFile:
    """Read and check a file's header, once as long as the file does not change.

    Raises:
        ValueError: no such file (with `advice`), not a safetensors file, damaged, or of another format or version.
    """
    file = Path(path).expanduser()
    if not is_file(file):
        raise ValueError(f"{what}: there is no such file. {advice}")
    stat = file.stat()
    return _open(str(file), what, form, version, kind, advice, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _open(path: str, what: str, form: str, version: str, kind: str, advice: str, changed: int, size: int) -> ModelFile:
    with open_tensors(path, what) as file:
        metadata = file.metadata() or {}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        dtypes = frozenset(part.get_dtype() for part in slices.values())
        whole = "sha256" not in metadata or digest(shapes, file.get_tensor) == metadata["sha256"]
    if metadata.get("format") != form:
        raise ValueError(f"{what}: not a {kind} of kvcache-compress. {advice}")
    if metadata.get("version") != version:
        problem = f"format version {metadata.get('version')!r}, this release reads {version!r}"
        raise ValueError(f"{what}: {on_one_line(problem, 600)}")
    try:
        facts = ModelFacts.read(metadata)
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: {on_one_line(f'its metadata is damaged ({error})', 600)}") from None
    if not whole:
        raise ValueError(f"{what}: damaged: its numbers have changed since it was written")
    return ModelFile(path, what, facts, metadata, shapes, dtypes)
