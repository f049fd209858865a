"""Read and restore the state of Transformers' own cache layers, as plain values and tensors.

Such a layer keeps its state in attributes: tensors, numbers, flags, dtypes, devices, and dictionaries of these with
integer keys. A new layer of the same class, made from the model's config, shows which attributes and types to expect.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

_LATE = ("dtype", "device", "indexer_dtype", "indexer_device", "batch_size", "num_heads", "k_head_dim", "v_head_dim")
"""Attributes that a layer gets with its first tokens."""


def read_attributes(layer: Any, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read a layer's attributes as JSON values, and by name the tensors that these refer to."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": True}
        if isinstance(value, dict) and all(isinstance(key, int) for key in value):
            return {"items": {str(key): plain(f"{name}.{key}", item) for key, item in value.items()}}
        raise ValueError(
            f"layer {index}, a {type(layer).__name__}, cannot be saved: {name} is a {type(value).__name__}"
        )

    held = {name: value for name, value in vars(layer).items() if not isinstance(value, PreTrainedConfig)}
    return {name: plain(name, value) for name, value in held.items()}, tensors


def set_attributes(
    layer: Any, attributes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Restore in a new layer the attributes that `read_attributes` took from a layer of the same class."""

    def value_of(name: str, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return stored
        kind, held = next(iter(stored.items()), (None, None))
        if kind == "tensor" and isinstance(held, str) and held in tensors:
            return tensors[held]
        if kind == "dtype" and isinstance(getattr(torch, str(held), None), torch.dtype):
            return getattr(torch, str(held))
        if kind == "device" and held is True:
            return device
        if kind == "items" and isinstance(held, dict) and all(key.isdecimal() for key in held):
            return {int(key): value_of(name, item) for key, item in held.items()}
        raise ValueError(f"damaged: {name}={stored!r}")

    fresh = {name: value for name, value in vars(layer).items() if not isinstance(value, PreTrainedConfig)}
    new = {name: value_of(name, stored) for name, stored in attributes.items()}
    if differing := fresh.keys() - new.keys() or new.keys() - fresh.keys() - {*_LATE}:
        raise ValueError(f"saved with another release of Transformers, whose layers differ in {min(differing)}")
    for name, value in fresh.items():
        if type(value) is int and value and new[name] != value:  # a size once set, such as a sliding window's
            raise ValueError(f"{name} is {new[name]!r} in the file, but {value} in the model")
    vars(layer).update(new)
    if layer.is_compileable:
        for tensor in tensors.values():
            torch._dynamo.mark_static_address(tensor)
