"""Method `none`: keep one side of a layer uncompressed while the other is compressed."""

from functools import cached_property
from typing import Any, ClassVar

import torch

from kvcache_compress.codecs.base import Codec, CodecContext, Fields, MethodOptions, Rope, Side
from kvcache_compress.codecs.layout import Field
from kvcache_compress.cpu_kernels.common.operands import CPUSide
from kvcache_compress.methods.registry import register_method


@register_method
class DenseCodec(Codec):
    """One side of a layer in the model's dtype.

    A layer with `none` on both sides does not use it; it stays Transformers' `DynamicLayer`.
    """

    name: ClassVar[str] = "none"

    def __init__(self, options: MethodOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        self.fields = (Field("dense", context.dtype, (context.head_dim,)),)

    @classmethod
    def layout(cls, options: MethodOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        return (Field("dense", torch.bfloat16, (head_dim,)),)

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        return (x.to(self.context.dtype),)

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        return fields[0].float()

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.dense import dense_side

        return dense_side(self.context)

    @cached_property
    def cpu_side(self) -> CPUSide:
        return CPUSide("dense")
