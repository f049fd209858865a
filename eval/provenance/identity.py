"""Digests that identify a result's model and options, and texts without this machine's folders."""

import hashlib
import json
import re
from typing import Any

import torch
from transformers import PreTrainedModel

_NUMBERS = 16
_ABSOLUTE = re.compile(r"(?<![\w:/.])(?:/[^\s/:;,'\"()\[\]{}=]+){2,}")


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
    if isinstance(option, dict):
        return {key: strip_folders(value) for key, value in option.items()}
    if isinstance(option, (list, tuple)):
        return [strip_folders(item) for item in option]
    return without_folders(option) if isinstance(option, str) else option
