"""KIVI (Liu et al., arXiv 2402.02750): uniform codes, grouped per channel for keys and per token for values.

For keys, `group_size` consecutive tokens of a channel share a scale and a zero point; for values, `group_size`
consecutive channels of a token do. Both are stored in 16 bits, so b-bit codes take b + 32 / group_size bits in total.
"""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Limits

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import Codec, Fields, MethodOptions, Rope, Side
from kvcache_compress.codecs.layout import CODES_PER_WORD, PLANES, Field, check_head_dim, code_fields
from kvcache_compress.cpu_kernels.common.operands import CPUSide
from kvcache_compress.methods.registry import register_method


class KIVIOptions(MethodOptions):
    """Options of `kivi`, for one side.

    Attributes:
        bits: 1 to 6.
        group_size: tokens (keys) or channels (values) per scale.
    """

    bits: Annotated[int, Limits(ge=1, le=6)] = 4
    group_size: Literal[16, 32, 64, 128] = 32


@register_method
class KIVICodec(Codec):
    """One side of a layer under KIVI: `x ≈ code * scale + zero`."""

    name: ClassVar[str] = "kivi"
    Options: ClassVar[type[MethodOptions]] = KIVIOptions
    options: KIVIOptions

    @classmethod
    def layout(cls, options: KIVIOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        check_head_dim(cls.name, head_dim, CODES_PER_WORD, CODES_PER_WORD)
        group: int = options.group_size
        if side == "keys":
            shape, tokens = (head_dim,), group
        else:
            if head_dim % group:
                fitting = [str(size) for size in (16, 32, 64, 128) if head_dim % size == 0]
                advice = f"use {' or '.join(fitting)}" if fitting else "no group size does: use turboquant for values"
                raise ValueError(
                    f"group_size={group} for kivi values must divide the head dimension {head_dim}; {advice}"
                )
            shape, tokens = (head_dim // group,), 1
        scales = (Field("scale", torch.float16, shape, tokens), Field("zero", torch.float16, shape, tokens))
        return (*code_fields(options.bits, head_dim), *scales)

    def _grouped(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Split the grouped axis of `[B, H, T, D]` in two; return the axis within a group too."""
        if self.context.side == "keys":
            return x.unflatten(2, (-1, self.options.group_size)), 3
        return x.unflatten(3, (-1, self.options.group_size)), 4

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        grouped, axis = self._grouped(x.float())
        low, high = grouped.amin(axis), grouped.amax(axis)
        limit = torch.finfo(torch.float16).max
        zero = low.clamp(-limit, limit).to(torch.float16)
        scale = ((high - low) / (2**self.options.bits - 1)).clamp(max=limit).to(torch.float16)
        tokens, channels = (self.options.group_size, 1) if axis == 3 else (1, self.options.group_size)
        quantize_on = getattr(self.native, "quantize_groups", quantize)
        return (*quantize_on(x.float(), scale, zero, self.options.bits, tokens, channels), scale, zero)

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        codes = packing.unpack(fields[: len(PLANES[self.options.bits])], self.options.bits)
        grouped, axis = self._grouped(codes.float())
        scale, zero = (field.float().unsqueeze(axis) for field in fields[-2:])
        return (grouped * scale + zero).flatten(axis - 1, axis)

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.kivi import kivi_side

        return kivi_side(self.context, self.options.bits, self.options.group_size)

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.kivi import kivi_encoder

        return kivi_encoder(self.context, self.options.bits, self.options.group_size)

    @cached_property
    def cpu_side(self) -> CPUSide:
        group = self.options.group_size
        return CPUSide("groups", (self.options.bits, *((group, 1) if self.context.side == "keys" else (1, group))))


def quantize(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, tokens: int, channels: int
) -> tuple[torch.Tensor, ...]:
    """Bit planes of `x` `[B, H, T, D]`, with one scale and zero point per `tokens` tokens and `channels` channels.

    Codes are computed from the scale and zero point as stored in 16 bits, so that rounding these adds no bias.
    """
    steps = scale.float().repeat_interleave(tokens, 2).repeat_interleave(channels, 3).clamp_min(1e-30)
    start = zero.float().repeat_interleave(tokens, 2).repeat_interleave(channels, 3)
    codes = ((x - start) / steps + 0.5).floor().clamp(0, 2**bits - 1)
    return packing.pack(codes, bits)
