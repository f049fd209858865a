"""CommVQ (Li et al., ICML 2025): learned additive codes; those of keys commute with RoPE (sections 4.1 and 4.2).

RoPE is undone on a key, which is split into complex pairs z and normalized per head and token. Each residual round adds
`c[a] + i c[b]` to the g pairs of a group and stores the two 6-bit indices; RoPE multiplies both sides by `e^(imθ)`, so
the decoded key is rotated by its token's factors. Values use real codebooks in the same way, unlike in the paper, or
the paper's encoder: bits of a token over all heads, whose weighted sum is multiplied by the codebook once. The
codebooks come from a file that calibration writes (`codebook_file.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field as Limits

from kvcache_compress.codecs.base import Codec, CodecContext, Fields, MethodOptions, Rope, RopeUse, Side
from kvcache_compress.codecs.layout import Field, check_head_dim
from kvcache_compress.codecs.quantizers.scalar import SCALE_MAX, Scalar, stored_scalar
from kvcache_compress.cpu_kernels.common.operands import CPUSide
from kvcache_compress.methods.registry import register_method
from kvcache_compress.modeling.facts import model_facts
from kvcache_compress.modeling.rope import RopeLayout

from . import additive
from .bit_encoder import BitEncoder
from .codebook_file import CENTRES, code_bits, group_count, read_codebooks, rounds_for
from .residual import ResidualBooks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_BITS = 2.0
LARGEST_GAIN = 2.0
"""Largest stored scalar, in norms, so that a vector unlike those in calibration is not blown up."""


class CommVQOptions(MethodOptions):
    """Options of `commvq`, for one side.

    codebooks: path of the model's codebook file; without one a cache can be estimated but not built.
    bits: code bits per number, which set the number of residual rounds; by default those of the calibration.
    scalar: number stored per head and token, by default `match` (`norm` is the paper's).
    any_model: accept a file for a model of another name, as long as dimensions and RoPE agree.
    """

    codebooks: str | None = None
    bits: Annotated[float, Limits(ge=0.25, le=6)] | None = None
    scalar: Scalar | None = None
    any_model: bool = False


@register_method
class CommVQCodec(Codec):
    """One side of a layer under CommVQ; see the module's docstring."""

    name: ClassVar[str] = "commvq"
    Options: ClassVar[type[MethodOptions]] = CommVQOptions
    options: CommVQOptions

    def __init__(self, options: CommVQOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        file = read_codebooks(options.codebooks)
        heads = file.local_heads(context.heads, context.head_dim)
        self.scalar: Scalar = options.scalar or "match"
        tensors = file.load(f"{context.side}.{context.layer}.", context.device)
        self.books: ResidualBooks | BitEncoder
        if "codebooks" in tensors:
            books = tensors["codebooks"][heads, :, : file.rounds(context.side, options.bits)]
            books = books.mT if context.side == "keys" else books
            self.books = ResidualBooks(books.clone(memory_format=torch.contiguous_format))
        elif context.heads < file.facts.kv_heads:
            raise file.refusal(
                f"its encoder of values needs all {file.facts.kv_heads} heads of a token together, and tensor "
                f"parallelism leaves {context.heads} here: calibrate values without an encoder"
            )
        else:
            self.books = BitEncoder(tensors, context.heads)
            self.chunks_on_cpp = False

    @classmethod
    def layout(cls, options: CommVQOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        check_head_dim(cls.name, head_dim, 16, 16)
        scale = Field("scale", torch.float16)
        if options.codebooks is None:
            groups = group_count(head_dim)
            rounds = rounds_for(options.bits or DEFAULT_BITS, side, head_dim, groups)
            return Field("codes", torch.uint8, (additive.code_bytes(groups * rounds, code_bits(side)),)), scale
        return Field("codes", torch.uint8, (read_codebooks(options.codebooks).row_bytes(side, options.bits),)), scale

    @classmethod
    def rope_use(cls, options: CommVQOptions, side: Side) -> RopeUse:
        return "factors" if side == "keys" else "none"

    @classmethod
    def check_model(
        cls, options: CommVQOptions, side: Side, config: PreTrainedConfig, layer: int, rope: RopeLayout | None
    ) -> None:
        file = read_codebooks(options.codebooks)
        file.check_model(model_facts(config), rope=side == "keys", any_model=options.any_model)
        if not any(name.startswith(f"{side}.{layer}.") for name in file.shapes):
            raise file.refusal(f"it holds no {side} of layer {layer}")

    @classmethod
    def constant_size(cls, options: CommVQOptions, side: Side, head_dim: int, heads: int) -> int:
        """Bytes of the codebooks of a layer."""
        if options.codebooks is None:
            cls.layout(options, side, head_dim)
            rounds, centres = rounds_for(options.bits or DEFAULT_BITS, side, head_dim, group_count(head_dim)), CENTRES
        else:
            file = read_codebooks(options.codebooks)
            if side == "values" and file.encoder_bits:
                return super().constant_size(options, side, head_dim, heads)
            rounds, centres = file.rounds(side, options.bits), file.shape(side)[3]
        return torch.float16.itemsize * heads * rounds * centres * head_dim

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        x, layout = x.float(), self.context.rope
        if self.context.side == "keys" and layout is not None and rope is not None:
            x = torch.stack(layout.split(layout.unrotate(x, rope)), -1).flatten(-2)
        norm = usual = x.norm(dim=-1)
        z = x / norm.clamp_min(1e-30)[..., None]
        if isinstance(self.books, BitEncoder):
            codes, point, usual = self.books.encode(x)
            norm = usual if self.scalar == "norm" else norm
        else:
            codes, point = self.books.encode(z, self.native)
        scale = stored_scalar(z, point, norm, self.scalar)
        return codes, torch.fmin(scale, (LARGEST_GAIN * usual).clamp(max=SCALE_MAX).to(torch.float16))

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        packed, scale = fields
        x = self.books.decode(packed) * scale.float()[..., None]
        layout = self.context.rope
        if self.context.side == "values" or layout is None or rope is None:
            return x
        return layout.rotate(layout.join(x[..., ::2], x[..., 1::2]), rope)

    def accumulate(self, weights: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        """Sum values; with the encoder, sum the bits of whole tokens: `[B, H, R, bits]`."""
        if isinstance(self.books, BitEncoder):
            packed, scale = fields
            return (weights * scale.float()[:, :, None]) @ self.books.bits(packed)
        return super().accumulate(weights, fields, rope)

    def map_output(self, accumulated: torch.Tensor) -> torch.Tensor:
        return accumulated @ self.books.codebook.float() if isinstance(self.books, BitEncoder) else accumulated

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.commvq import bits_side, books_side

        if isinstance(self.books, BitEncoder):
            return bits_side(self.books.codebook.float())
        rope = self.context.rope if self.context.side == "keys" else None
        return books_side(self.books.books, self.fields[0].shape[0], rope)

    @cached_property
    def cpu_side(self) -> CPUSide:
        """C++ operands; code space holds pairs of keys, real parts first, or with the encoder all bits of a token."""
        books = self.books
        if isinstance(books, BitEncoder):
            return CPUSide("bits", basis=books.codebook)
        options, tables = (books.groups, books.rounds), (books.books.flatten(0, 2),)
        if self.context.side == "values":
            return CPUSide("additive", options, tables)
        rope = self.context.rope
        assert rope is not None
        basis = None if rope.in_order else torch.eye(len(rope.order), device=books.books.device)[[*rope.order]][None]
        return CPUSide("complex", options, tables, basis)
