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
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.files.model_file import ModelFile, write_model_file
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.validation import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KIND, VERSION = "statistics", 1
ADVICE = (
    "Make one with `kvcache-compress calibrate --method spectral --model MODEL --text FILE --output FILE.safetensors`"
)
PARTS = ("basis", "deviation", "places", "means")


def write_statistics(
    path: str, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], group: int, data: Any
) -> None:
    """Write the tensors as float32."""
    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    write_model_file(path, KIND, VERSION, model_facts(config), plain, group=group, data=data)


def read_statistics(path: str) -> ModelFile:
    """Read and check the file's header."""
    return ModelFile.open(path, f"statistics={quoted(path)} for spectral", KIND, VERSION, ADVICE)
