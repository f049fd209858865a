"""No compression: one side of a layer kept as it is while the other is compressed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from ..codec import Codec, CodecContext, Fields, MethodOptions, Rope, Side
from ..layout import Field
from ..registry import register_method

if TYPE_CHECKING:
    from ..cpu_kernels.operands import CPUSide
    from ..triton_kernels.operands import KernelSide


class DenseOptions(MethodOptions):
    """`none` takes no options."""


@register_method
class DenseCodec(Codec):
    """Stores vectors in the model's own dtype.

    A layer whose two sides are `none` never gets here: it stays Transformers' own `DynamicLayer`, bit for bit.
    """

    name: ClassVar[str] = "none"
    Options: ClassVar[type[MethodOptions]] = DenseOptions

    def __init__(self, options: DenseOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        self.fields = (Field("dense", context.dtype, (context.head_dim,)),)

    @classmethod
    def layout(cls, options: DenseOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        return (Field("dense", torch.bfloat16, (head_dim,)),)

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        return (x.to(self.context.dtype),)

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        return fields[0].float()

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return query

    def score(self, mapped: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        return mapped @ fields[0].float().mT

    def accumulate(self, weights: torch.Tensor, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        return weights @ fields[0].float()

    def map_output(self, accumulated: torch.Tensor) -> torch.Tensor:
        return accumulated

    @cached_property
    def kernel_side(self) -> KernelSide:
        from ..triton_kernels.dense import dense_side

        return dense_side(self.context.head_dim, self.context.device)

    @cached_property
    def cpu_side(self) -> CPUSide:
        from ..cpu_kernels.operands import CPUSide

        return CPUSide("dense")
