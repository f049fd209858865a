"""The file of a model's spectral statistics: one safetensors file, written by calibration.

Tensors, float32, for H key/value heads of dimension D and groups of n tokens:

    keys.{layer}.basis        [H, D, D]       encoding basis, see `transform.spectral_basis`
    keys.{layer}.deviation    [H, D]          standard deviations along it, descending
    keys.{layer}.places       [H, n, RANK]    the mean key at each position in a group is `places @ means`,
    keys.{layer}.means        [H, RANK, D]    see `transform.mean_table`

Header entries beyond those of every model file: `group` (n), and `data` with the texts and their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.files.model_file import ModelFile, write_model_file
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.validation import quoted

from .transform import RANK

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KIND, VERSION = "statistics", 1
ADVICE = (
    "Make one with `kvcache-compress calibrate --method spectral --model MODEL --text FILE --output FILE.safetensors`"
)
PARTS = ("basis", "deviation", "places", "means")
GROUPS = (32, 64, 128)
"""Allowed numbers of tokens per anchor; they divide the chunks in which tokens are encoded and decoded."""


def write_statistics(
    path: str, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], group: int, data: Any
) -> None:
    """Write the tensors as float32."""
    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    write_model_file(path, KIND, VERSION, model_facts(config), plain, group=group, data=data)


def read_statistics(path: str) -> ModelFile:
    """Read and check the file's header.

    Raises:
        ValueError: the file is missing, damaged, or not a spectral statistics file.
    """
    return _checked(ModelFile.open(path, f"statistics={quoted(path)} for spectral", KIND, VERSION, ADVICE))


@lru_cache(maxsize=8)
def _checked(file: ModelFile) -> ModelFile:
    """Check, once per file, that its tensors have the shapes of the model that it names."""
    heads, dim, size = file.facts.kv_heads, file.facts.head_dim, file.header.get("group")
    if size not in GROUPS:
        raise file.refusal(f"damaged: group {size!r}")
    expected = {
        "basis": (heads, dim, dim),
        "deviation": (heads, dim),
        "places": (heads, size, RANK),
        "means": (heads, RANK, dim),
    }
    for name, shape in file.shapes.items():
        if not name.startswith("keys.") or expected.get(name.rpartition(".")[2]) != shape:
            raise file.refusal(f"damaged: an unexpected tensor {name!r} of shape {list(shape)}")
    return file


def check_model(file: ModelFile, config: PreTrainedConfig, layer: int, any_model: bool) -> None:
    """Raise `ValueError` if the file was made for another model or lacks this layer."""
    file.check_model(model_facts(config), any_model=any_model)
    if missing := [part for part in PARTS if f"keys.{layer}.{part}" not in file.shapes]:
        raise file.refusal(f"it holds no keys of layer {layer} ({missing[0]})")


def load_layer(file: ModelFile, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A layer's tensors, named without the prefix `keys.{layer}.`, and the `inverse` of its basis.

    Raises:
        ValueError: numbers are not finite, deviations are not positive, or a basis has no inverse.
    """
    prefix = f"keys.{layer}."
    names = [f"{prefix}{part}" for part in PARTS]
    tensors = {name.removeprefix(prefix): tensor for name, tensor in file.load(names, device).items()}
    if not (tensors["deviation"] > 0).all():
        raise file.refusal(f"damaged: {prefix}deviation holds numbers of zero or less")
    inverse, failed = torch.linalg.inv_ex(tensors["basis"].double())
    if failed.any():
        raise file.refusal(f"damaged: {prefix}basis has no inverse")
    return tensors | {"inverse": inverse.float()}
