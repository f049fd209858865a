"""The file of a model's spectral statistics: one safetensors file, written by calibration.

Tensors `keys.{layer}.{part}` are what the layer's codec measured. For H key/value heads of dimension D and groups of n
tokens:

    directions  [H, D, D], float16     rows of the basis's inverse times their deviations, divided by their lengths
    lengths     [H, D]                 powers of two
    deviation   [H, D]                 standard deviations along the basis, descending; see `transform.spectral_basis`
    places      [H, n, RANK], float16  the mean key at each position in a group is `places @ means`,
    means       [H, RANK, D], float16  see `transform.mean_table`

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

KIND, VERSION = "statistics", 2
ADVICE = (
    "Make one with `kvcache-compress calibrate --method spectral --model MODEL --text FILE --output FILE.safetensors`"
)
PARTS = ("directions", "lengths", "deviation", "places", "means")


def write_statistics(
    path: str, config: PreTrainedConfig, layers: Mapping[int, Mapping[str, torch.Tensor]], group: int, data: Any
) -> None:
    """Write the statistics of layers, by number."""
    tensors = {f"keys.{layer}.{part}": found[part].cpu() for layer, found in layers.items() for part in PARTS}
    write_model_file(path, KIND, VERSION, model_facts(config), tensors, group=group, data=data)


def read_statistics(path: str) -> ModelFile:
    """Read and check the file's header."""
    return ModelFile.open(path, f"statistics={quoted(path)} for spectral", KIND, VERSION, ADVICE)
