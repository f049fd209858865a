"""CommVQ's codebook file: one safetensors file per model, written by calibration, read and checked by the codec.

Header beside that of every model file: `options`, `data` and `losses` of the calibration. Tensors, float16, for H
key/value heads, G groups of g pairs (G * g = head_dim / 2), R rounds of N centres:

    keys.{layer}.codebooks    [H, G, R, N, g, 2]          real and imaginary parts
    values.{layer}.codebooks  [H, G, R, N, head_dim / G]  the residual form, or the paper's:
    values.{layer}.weight1    [hidden, H * head_dim]      values.{layer}.bias1  [hidden]
    values.{layer}.weight2    [bits, hidden]              values.{layer}.bias2  [bits]
    values.{layer}.codebook   [bits, H * head_dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.codecs.base import Side
from kvcache_compress.files.model_file import ModelFacts, ModelFile, write_model_file
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.validation import quoted

from .additive import code_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KIND, VERSION = "codebooks", 1
ADVICE = (
    "Make one with `kvcache-compress calibrate --method commvq --model MODEL --text FILE --output FILE.safetensors`"
)
CENTRES, GROUP_PAIRS = 64, 64


def group_count(head_dim: int) -> int:
    """Default number of groups of a head: the fewest with a multiple of 8 pairs, at most `GROUP_PAIRS`, each."""
    counts = (count for count in range(1, head_dim) if head_dim % (16 * count) == 0)
    return next(count for count in counts if head_dim // (2 * count) <= GROUP_PAIRS)


def code_bits(side: Side, centres: int = CENTRES) -> int:
    """Bits of one group's code per round: two indices for keys, one for values."""
    return (2 if side == "keys" else 1) * (centres.bit_length() - 1)


def rounds_for(bits: float, side: Side, head_dim: int, groups: int, centres: int = CENTRES) -> int:
    """Residual rounds that come closest to `bits` code bits per number, such as 21 for keys at 2 bits and D = 128."""
    return max(1, round(bits * head_dim / (groups * code_bits(side, centres))))


class Codebooks(ModelFile):
    """A codebook file; its header has `options`, `data` and `losses` of the calibration."""

    @property
    def encoder_bits(self) -> int:
        """Bits per token of the paper's encoder of values, over all heads; 0 if values have the residual form."""
        return next((shape[0] for name, shape in self.shapes.items() if name.endswith(".codebook")), 0)

    def shape(self, side: Side) -> tuple[int, int, int, int]:
        """Shape (heads, groups, rounds, centres) of the codebooks of a side in residual form."""
        for name, shape in self.shapes.items():
            if name.startswith(side) and name.endswith(".codebooks"):
                return shape[0], shape[1], shape[2], shape[3]
        raise self.refusal(f"it holds no {side}")

    def rounds(self, side: Side, bits: float | None) -> int:
        """Rounds for `bits` code bits per number, by default all: the first ones can be used alone."""
        _, groups, available, centres = self.shape(side)
        wanted = available if bits is None else rounds_for(bits, side, self.facts.head_dim, groups, centres)
        if wanted > available:
            most = available * groups * code_bits(side, centres) / self.facts.head_dim
            raise ValueError(f"bits={bits:g} for commvq: {self.path!r} has only {most:.3g} for {side}")
        return wanted

    def row_bytes(self, side: Side, bits: float | None) -> int:
        """Bytes of a token's codes per head."""
        if side == "values" and self.encoder_bits:
            share = self.encoder_bits // self.facts.kv_heads
            available = share / self.facts.head_dim
            if bits not in (None, available):
                raise ValueError(f"bits={bits:g} for commvq must be {available:.3g} with the encoder of {self.path!r}")
            return share // 8
        _, groups, _, centres = self.shape(side)
        return code_bytes(groups * self.rounds(side, bits), code_bits(side, centres))


def codebook_facts(config: PreTrainedConfig) -> ModelFacts:
    """Facts of a model for its codebook file; raises `ValueError` if it has no RoPE of a known kind."""
    facts = model_facts(config)
    if not facts.rope:
        raise ValueError(f"{config.model_type} has no rotary position embeddings of a known kind: commvq needs them")
    return facts


def write_codebooks(
    path: str | Path, config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor], **header: Any
) -> None:
    """Write the tensors, as float16; an existing file is replaced only once all is written."""
    halves = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}
    write_model_file(path, KIND, VERSION, codebook_facts(config), halves, **header)


def read_codebooks(path: str | None) -> Codebooks:
    """Read and check the header of a codebook file, once as long as the file does not change."""
    if path is None:
        raise ValueError(f"codebooks=None for commvq: the codebooks of the model are needed. {ADVICE}")
    return Codebooks.open(path, f"codebooks={quoted(path)} for commvq", KIND, VERSION, ADVICE)
