"""Add a method of your own, with options, a layout, an encoder and a decoder: `python examples/own_method.py`.

The method rounds each token's numbers to evenly spaced multiples of one scale. It runs in torch on every device.
"""

from typing import ClassVar

import pydantic
import torch

from kvcache_compress import CompressedCache, enable_fused_attention, register_method
from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import Codec, Fields, MethodOptions, Rope, Side
from kvcache_compress.codecs.layout import Field, check_head_dim, code_fields
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model


class RoundingOptions(MethodOptions):
    """Options of `rounding` for keys or values: `bits` per number."""

    bits: int = pydantic.Field(4, ge=2, le=6)


@register_method
class RoundingCodec(Codec):
    """`x ≈ (code - middle) * scale`, with one scale per token."""

    name: ClassVar[str] = "rounding"
    Options: ClassVar[type[MethodOptions]] = RoundingOptions

    @classmethod
    def layout(cls, options: RoundingOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        check_head_dim(cls.name, head_dim, 8, 8)
        return (*code_fields(options.bits, head_dim), Field("scale", torch.float16))

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        top = 2**self.options.bits - 1
        scale = (2 / top * x.float().abs().amax(-1)).clamp(2**-24, 65504).half()  # what float16 holds
        codes = (x.float() / scale.float()[..., None] + top / 2).round().clamp(0, top)
        return (*packing.pack(codes, self.options.bits), scale)

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        *planes, scale = fields
        middle = (2**self.options.bits - 1) / 2
        return (packing.unpack(tuple(planes), self.options.bits) - middle) * scale.float()[..., None]


if __name__ == "__main__":
    model, tokenizer = load_model("smollm2-135m")
    enable_fused_attention(model)
    config = {"keys": {"method": "rounding", "bits": 4}, "values": {"method": "turboquant", "bits": 3}}
    cache = CompressedCache(model.config, config)
    inputs = tokenizer("The lighthouse on the cape was built of granite. " * 30, return_tensors="pt")
    output = model.generate(**inputs, **{cache_argument(): cache}, max_new_tokens=24, do_sample=False)
    print(tokenizer.decode(output[0, -24:]))
    print(cache.memory_report())
