"""State of Transformers' own cache layers, as plain values and tensors.

The state of such a layer is in its attributes: tensors, numbers, flags, dtypes, devices, and dictionaries of these by
number. A new layer of the same class, made from the model's config, shows the attributes and their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

_LATE = ("dtype", "device", "indexer_dtype", "indexer_device", "batch_size", "num_heads", "k_head_dim", "v_head_dim")
"""Attributes that a layer gets with its first tokens."""
_SIZES = ("batch_size", "num_heads", "k_head_dim", "v_head_dim", "conv_kernel_size")


def read_attributes(layer: Any, index: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read a layer's attributes as JSON values, and the tensors that these refer to by name.

    Raises:
        ValueError: An attribute has a type that cannot be saved.
    """
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
    """Set a new layer's attributes to those that `read_attributes` took from another of its class.

    Raises:
        ValueError: No layer of this class can have these attributes or tensors.
    """
    left = dict(tensors)

    def value_of(name: str, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return stored
        kind, held = next(iter(stored.items()), (None, None))
        if kind == "tensor" and isinstance(held, str) and held in left:
            return left.pop(held)
        if kind == "dtype" and isinstance(getattr(torch, str(held), None), torch.dtype):
            return getattr(torch, str(held))
        if kind == "device" and held is True:
            return device
        if kind == "items" and isinstance(held, dict) and all(key.isdecimal() for key in held):
            return {int(key): value_of(name, item) for key, item in held.items()}
        raise ValueError(f"damaged: {name}={stored!r}")

    fresh = {name: value for name, value in vars(layer).items() if not isinstance(value, PreTrainedConfig)}
    new = {name: value_of(name, stored) for name, stored in attributes.items()}
    if missing := fresh.keys() - new.keys():
        raise ValueError(f"damaged, or of another release of Transformers: no {min(missing)}")
    for name, value in new.items():
        known = name in fresh or (name in _LATE and value is not None)
        if not known or not _may_become(name, fresh.get(name), value):
            raise ValueError(f"damaged, or of another release of Transformers: {name}={attributes[name]!r}")
    if left:
        raise ValueError(f"damaged: superfluous tensors {sorted(left)}")
    if problem := next(_contradictions(new, fresh), None):
        raise ValueError(f"damaged: {problem}")
    vars(layer).update(new)
    if layer.is_compileable:
        for tensor in tensors.values():
            torch._dynamo.mark_static_address(tensor)


def _may_become(name: str, fresh: Any, value: Any) -> bool:
    """True if an attribute that is `fresh` in a new layer can have this value later; sizes once set cannot change."""
    if isinstance(fresh, dict):
        return (
            isinstance(value, dict)
            and fresh.keys() == value.keys()
            and all(_may_become(name, fresh[key], value[key]) for key in fresh)
        )
    if isinstance(fresh, torch.Tensor):
        alike = isinstance(value, torch.Tensor) and (fresh.dtype, fresh.shape) == (value.dtype, value.shape)
        return alike and bool((value >= 0).all()) and (not fresh.any() or torch.equal(fresh, value.cpu()))
    if isinstance(fresh, bool):
        return isinstance(value, bool)
    if isinstance(fresh, int):
        return type(value) is int and value >= 0 and fresh in (0, value)
    if fresh is None and name in _SIZES:
        return value is None or (type(value) is int and value >= 0)
    if fresh is None:
        kind = torch.dtype if name.endswith("dtype") else torch.device if name.endswith("device") else torch.Tensor
        return value is None or isinstance(value, kind)
    return bool(fresh == value)


def _dense(x: torch.Tensor) -> bool:
    """True if a tensor's dtype can hold keys, values or states."""
    return x.is_floating_point() and x.itemsize > 1


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """True if converting floating-point numbers from `narrow` to `wide` loses nothing."""
    return narrow.is_floating_point and torch.promote_types(wide, narrow) == wide


def _contradictions(new: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[str]:
    """Descriptions of attributes that contradict each other."""
    pair = [new[name] for name in ("keys", "values") if isinstance(new.get(name), torch.Tensor)]
    filled = [x for x in pair if x.numel()]
    if fresh.get("is_initialized") is False and len(pair) != 2 * new["is_initialized"]:
        yield f"is_initialized={new['is_initialized']} with {len(pair)} tensors"
    if not all(map(_dense, pair)):
        yield f"keys and values of {pair[0].dtype} and {pair[1].dtype}"
    if any(x.ndim != 4 or x.shape[:3] != pair[0].shape[:3] for x in (pair if filled else ())):
        yield f"keys and values of shapes {[list(x.shape) for x in pair]}"
    tokens = filled[0].shape[2] if filled and filled[0].ndim == 4 else 0
    if "max_cache_len" in new and filled and tokens != new["max_cache_len"]:
        yield f"room for {tokens} tokens, not {new['max_cache_len']}"
    if "max_cache_len" in new and tokens:
        sizes = {"batch_size": 0, "num_heads": 1, "k_head_dim": 3, "v_head_dim": 3}
        for name, axis in sizes.items():
            size = pair[name == "v_head_dim"].shape[axis]
            if new.get(name) != size:
                yield f"{name}={new.get(name)} for tensors with {size}"
    dtype = new.get("dtype")
    if any(dtype not in (None, x.dtype) and ("max_cache_len" in new or not _holds(x.dtype, dtype)) for x in pair):
        yield f"keys and values of {pair[0].dtype} and {pair[1].dtype} in a layer of {dtype}"
    if "cumulative_length_int" in new:
        seen, capacity, counted = new["cumulative_length_int"], new["max_cache_len"], int(new["cumulative_length"])
        if counted > capacity or (seen <= capacity and counted != seen):
            yield f"lengths of {seen} and {counted} in a window of {capacity}"
    if "sliding_window" in new and isinstance(new.get("cumulative_length"), int):
        seen, window = new["cumulative_length"], new["sliding_window"]
        if tokens > seen or (window > 1 and tokens != min(seen, window - 1) and not new.get("record_past")):
            yield f"{tokens} tokens of {seen} in a window of {window}"
    for number, size in new.get("conv_kernel_size", {}).items():
        state = new["conv_states"][number]
        if isinstance(state, torch.Tensor) and not new.get("record_past") and state.shape[-1:] != (size,):
            yield f"conv_kernel_size={size} for a state of shape {list(state.shape)}"
    for name in ("conv_states", "recurrent_states"):
        states, flags = new.get(name), new.get(f"is_{name}_initialized")
        if isinstance(states, dict) and isinstance(flags, dict):
            held = {
                key: isinstance(state, torch.Tensor) and state.ndim > 1 and _dense(state)
                for key, state in states.items()
            }
            if held != flags:
                yield f"{name} that are no tensors"
