"""CommVQ's codebook file: one safetensors file per model, written by calibration, read and checked by the codec.

Metadata beside those of every model file: `options`, `data` and `losses` of the calibration. Tensors, float16, for H
key/value heads, G groups of g pairs (G * g = head_dim / 2), R rounds of N centres:

    keys.{layer}.codebooks    [H, G, R, N, g, 2]          real and imaginary parts
    keys.{layer}.weights      [H, head_dim / 2]           optional: scales of the pairs before coding
    keys.{layer}.errors       [H, R + 1]                  optional: expected error after each number of rounds
    values.{layer}.codebooks  [H, G, R, N, head_dim / G]  the residual form (with `errors` likewise), or the paper's:
    values.{layer}.weight1    [hidden, H * head_dim]      values.{layer}.bias1  [hidden]
    values.{layer}.weight2    [bits, hidden]              values.{layer}.bias2  [bits]
    values.{layer}.codebook   [bits, H * head_dim]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcache_compress.codecs.allocation import allocate
from kvcache_compress.codecs.base import SIDES, Side
from kvcache_compress.files.tensors import open_tensors
from kvcache_compress.modeling.model_file import ModelFacts, ModelFile, open_model_file, write_model_file
from kvcache_compress.validation.messages import on_one_line, quoted

from .additive import code_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FORMAT, VERSION = "kvcache_compress.commvq", "1"
ENCODER = ("weight1", "bias1", "weight2", "bias2", "codebook")
PARTS = {"keys": ("codebooks", "errors", "weights"), "values": ("codebooks", "errors", *ENCODER)}
"""Tensors of a layer's side."""
CENTRES, GROUP_PAIRS = 64, 64
ALLOWED_CENTRES = {"keys": (2, 4, 8, 16, 32, 64), "values": (2, 4, 8, 16, 32, 64, 256)}


def refusal(path: str, problem: str) -> ValueError:
    """Error for a codebook file that cannot be used; `problem` may quote the file and is shortened to one line."""
    return ValueError(f"codebooks={quoted(path)} for commvq: {on_one_line(problem, 600)}")


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


def share_rounds(errors: Sequence[Sequence[float]], groups: int, bits: int, most_bytes: int) -> tuple[int, ...]:
    """Share a token's bytes out among heads: rounds of each, at least one, with the least error in all.

    errors: of each head, the expected error after 0, 1, 2 ... rounds.
    groups, bits: a round of a head has `groups` codes of so many bits; the codes of a head fill whole bytes.
    most_bytes: bytes per token for all heads together.
    """
    sizes = [[code_bytes(groups * count, bits) for count in range(1, len(error))] for error in errors]
    return tuple(1 + number for number in allocate(sizes, [error[1:] for error in errors], most_bytes))


@dataclass(frozen=True)
class CodebookHeader:
    """Metadata of a codebook file, and the shapes of its tensors."""

    path: str
    facts: ModelFacts
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    losses: Any = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.facts.head_dim

    @property
    def kv_heads(self) -> int:
        return self.facts.kv_heads

    @property
    def encoder_bits(self) -> int:
        """Bits per token of the paper's value encoder, over all heads; 0 if values have the residual form."""
        codebook = next((shape for name, shape in self.shapes.items() if name.endswith(".codebook")), (0,))
        return codebook[0] if codebook else 0

    def shape(self, side: Side) -> tuple[int, int, int, int]:
        """Shape (heads, groups, rounds, centres) of the codebooks of a side in residual form.

        Raises:
            ValueError: the file has no such codebooks.
        """
        for name, shape in self.shapes.items():
            if name.startswith(side) and name.endswith(".codebooks"):
                return shape[0], shape[1], shape[2], shape[3]
        raise refusal(self.path, f"it holds no {side}")

    def meant_rounds(self, side: Side) -> int | None:
        """Rounds of a head on average that calibration was to make; None in files where heads do not share them."""
        return self.data.get("rounds", {}).get(side)

    def rounds(self, side: Side, bits: float | None) -> int:
        """Number of rounds of a head for `bits` code bits per number, on average: the first ones can be used alone.

        By default those that calibration was to make; where heads share them, the file has some to spare.

        Raises:
            ValueError: the file has fewer rounds.
        """
        _, groups, available, centres = self.shape(side)
        wanted: int = (
            (self.meant_rounds(side) or available)
            if bits is None
            else rounds_for(bits, side, self.head_dim, groups, centres)
        )
        if wanted > available:
            most = available * groups * code_bits(side, centres) / self.head_dim
            raise ValueError(f"bits={bits:g} for commvq: the {side} in {self.path!r} have {most:.3g}")
        return wanted

    def row_bytes(self, side: Side, bits: float | None) -> int:
        """Bytes of a token's codes per head, on average."""
        _, groups, _, centres = self.shape(side)
        return code_bytes(groups * self.rounds(side, bits), code_bits(side, centres))

    def rounds_of_heads(
        self, side: Side, bits: float | None, heads: int, errors: torch.Tensor | None
    ) -> tuple[int, ...]:
        """Rounds of each of `heads` heads: shared out by their `errors` `[heads, R + 1]`, or all alike without them."""
        if errors is None:
            return (self.rounds(side, bits),) * heads
        _, groups, _, centres = self.shape(side)
        return share_rounds(errors.tolist(), groups, code_bits(side, centres), heads * self.row_bytes(side, bits))

    def encoder_share(self, bits: float | None) -> int:
        """Bits of the encoder per token and head.

        Raises:
            ValueError: the encoder has another number of `bits` per number.
        """
        share = self.encoder_bits // self.kv_heads
        available = share / self.head_dim
        if bits is not None and abs(available - bits) > 0.1 * bits:
            raise ValueError(f"bits={bits:g} for commvq: the encoder of {self.path!r} has {available:.3g}, no others")
        return share


def describe_model(
    config: PreTrainedConfig, path: str | Path, *, options: Any = None, data: Any = None, losses: Any = None
) -> CodebookHeader:
    """Header of a codebook file for this model.

    Raises:
        ValueError: The model has no RoPE of a known kind.
    """
    facts = ModelFacts.of(config)
    if not facts.rope:
        raise ValueError(f"{config.model_type} has no rotary position embeddings of a known kind: commvq needs them")
    return CodebookHeader(str(path), facts, options or {}, data or {}, losses)


def write_codebooks(header: CodebookHeader, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors, as float16, to `header.path`; an existing file is replaced only once all is written."""
    halves = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in tensors.items()}
    described = {"options": header.options, "data": header.data, "losses": header.losses}
    write_model_file(header.path, FORMAT, VERSION, header.facts, halves, **described)


@lru_cache(maxsize=8)
def _parsed(file: ModelFile) -> CodebookHeader:
    described = {name: file.described(name) for name in ("options", "data", "losses")}
    if wrong := [name for name in ("options", "data") if not isinstance(described[name], dict)]:
        raise file.refusal(f"its metadata is damaged ({wrong[0]} is no mapping)")
    header = CodebookHeader(file.path, file.facts, shapes=file.shapes, **described)
    if problem := _shape_problem(header) or (
        f"dtypes {sorted(file.dtypes)}, not F16" if file.dtypes - {"F16"} else None
    ):
        raise file.refusal(f"damaged: {problem}")
    return header


def read_header(path: str) -> CodebookHeader:
    """Read and check the header of a codebook file, once as long as the file does not change.

    Raises:
        ValueError: The file is missing, no safetensors file, cut short, of another format or version, or its tensors
            are missing or do not fit together.
    """
    what = f"codebooks={quoted(path)} for commvq"
    return _parsed(open_model_file(path, what, FORMAT, VERSION, "codebook file", how_to_calibrate()))


def how_to_calibrate() -> str:
    return (
        "Make one with `kvcache-compress calibrate --method commvq --model MODEL --text FILE --output FILE.safetensors`"
    )


def _shape_problem(header: CodebookHeader) -> str | None:
    """Description of what is wrong with the tensors' names and shapes, or None."""
    heads, dim = header.kv_heads, header.head_dim
    if not header.shapes:
        return "no tensors"
    kinds: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, shape in header.shapes.items():
        side, layer, kind = [*name.split("."), "", ""][:3]
        known = kind in PARTS.get(side, ()) and name == f"{side}.{layer}.{kind}"
        numbered = layer.isdecimal() and len(layer) < 6 and int(layer) < header.facts.layers
        if not known or not numbered:
            return f"an unexpected tensor {name!r}"
        if shape != kinds.setdefault((side, kind), shape):
            return f"{name} of shape {list(shape)}, where another layer has {list(kinds[side, kind])}"
    for (side, kind), shape in kinds.items():
        groups = shape[1] if len(shape) > 3 else 0
        divisible = groups > 0 and dim % (2 * groups) == 0
        parts = (dim // (2 * groups), 2) if divisible and side == "keys" else (dim // max(1, groups),)
        fits = divisible and shape[0] == heads and shape[2] > 0 and shape[4:] == parts
        if kind == "weights" and shape != (heads, dim // 2):
            return f"weights of shape {list(shape)} for {heads} heads of {dim}"
        if kind == "errors" and shape != (heads, kinds.get((side, "codebooks"), (0,) * 3)[2] + 1):
            return f"errors of {side} of shape {list(shape)} for {heads} heads"
        if kind == "codebooks" and not (fits and shape[3] in ALLOWED_CENTRES.get(side, ())):
            return f"{kind} of {side} of shape {list(shape)} for {heads} heads of {dim}"
    meant = header.data.get("rounds", {})
    for side in SIDES if isinstance(meant, dict) else ():
        rounds, made = meant.get(side), kinds.get((side, "codebooks"), (0, 0, 0))[2]
        if rounds is not None and made and not (type(rounds) is int and 1 <= rounds <= made):
            return f"rounds={rounds!r} of {side}, which have {made}"
    if not isinstance(meant, dict):
        return f"rounds={meant!r}"
    encoder = [kinds.get(("values", part), ()) for part in ENCODER]
    if any(encoder):
        hidden, bits, width = (encoder[0] or (0,))[0], header.encoder_bits, heads * dim
        if encoder != [(hidden, width), (hidden,), (bits, hidden), (bits,), (bits, width)] or bits % (8 * heads):
            return f"an encoder with shapes {encoder} for {heads} heads of {dim}"
        if ("values", "codebooks") in kinds:
            return "both an encoder and codebooks for values"
    return None


def check_model(
    header: CodebookHeader, side: Side, config: PreTrainedConfig, layer: int, any_model: bool = False
) -> None:
    """Raise `ValueError` if the file was made for another model, or lacks this layer."""
    if problem := header.facts.mismatch(config, rope=side == "keys", any_model=any_model):
        raise refusal(header.path, problem)
    _names(header, side, layer)


def _names(header: CodebookHeader, side: Side, layer: int) -> list[str]:
    encoder = side == "values" and header.encoder_bits
    names = [f"{side}.{layer}.{part}" for part in (ENCODER if encoder else ("codebooks",))]
    if missing := [name for name in names if name not in header.shapes]:
        raise refusal(header.path, f"it holds no {side} of layer {layer} ({missing[0]})")
    optional = (f"{side}.{layer}.{part}" for part in ("weights", "errors"))
    return [*names, *(name for name in optional if name in header.shapes)]


def load_layer(header: CodebookHeader, side: Side, layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Load the float16 tensors of one side of a layer, by the last part of their names.

    Raises:
        ValueError: the layer is missing, numbers are not finite, or weights are not positive.
    """
    prefix, names = f"{side}.{layer}.", _names(header, side, layer)
    with open_tensors(header.path, f"codebooks={quoted(header.path)} for commvq") as file:
        tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise refusal(header.path, f"damaged: {prefix}{name} holds NaN or infinity")
        if name == "weights" and not (tensor > 0).all():
            raise refusal(header.path, f"damaged: {prefix}{name} holds weights of zero or less")
    return {name: tensor.to(device) for name, tensor in tensors.items()}
