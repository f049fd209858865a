"""PolarQuant on RoPE pairs (Wu et al., arXiv 2502.00527): keys as one radius and one angle per pair of channels.

The two channels that RoPE rotates together are a point in the plane, usually on a ring, which leaves no outlier
channels (section 3). The radius takes `radius_bits`, scaled per channel or per group of tokens, and the angle
`angle_bits`.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Limits

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Rope, RopeUse, Side, Statistics
from kvcache_compress.codecs.layout import CODES_PER_WORD, PLANES, Field, check_head_dim, code_fields
from kvcache_compress.codecs.linear import LinearCodec, Part, centred
from kvcache_compress.codecs.quantizers.polar_pairs import PairCodes, quantize, quarter_bounds, radii
from kvcache_compress.codecs.quantizers.scalar import SCALE_MAX
from kvcache_compress.codecs.transforms.centering import Center
from kvcache_compress.cpu_kernels.common.operands import CPUSide, cpu_side
from kvcache_compress.methods.registry import register_method


class PolarQuantRopeOptions(MethodOptions):
    """Options of `polarquant_rope`, for keys.

    Attributes:
        angle_bits, radius_bits: 2 to 6 each; half of their sum is the bits per number.
        radius_scale: `group`, one scale per pair and `group_size` tokens; or `channel` (the paper's), one per pair for
            all tokens, from the first prefill, with later radii clamped.
        group_size: 32, 64 or 128.
        reconstruction: decode to the `midpoint` of a cell, or to its lower `edge` (the paper's formulas).
        scalar: `match` also stores ‖k‖ / ‖k̂‖ per token; `none` does not.
        center: subtract the mean key of the first prefill; `auto`: where it is large and sinks stay dense.
    """

    angle_bits: Annotated[int, Limits(ge=2, le=6)] = 4
    radius_bits: Annotated[int, Limits(ge=2, le=6)] = 4
    radius_scale: Literal["channel", "group"] = "group"
    group_size: Literal[32, 64, 128] = 64
    reconstruction: Literal["midpoint", "edge"] = "midpoint"
    scalar: Literal["none", "match"] = "none"
    center: Center = "auto"

    def idle(self) -> dict[str, str]:
        return {"group_size": "radius_scale 'group'"} if self.radius_scale == "channel" else {}

    @property
    def codes(self) -> PairCodes:
        """The coding of pairs. The largest radius is one unit per cell, or one unit less, as in the paper."""
        edge, tokens = self.reconstruction == "edge", self.group_size if self.radius_scale == "group" else 0
        steps, offset = 2**self.radius_bits - edge, 0.0 if edge else 0.5
        return PairCodes(self.angle_bits, self.radius_bits, tokens, steps, offset, self.scalar == "match")


@register_method
class PolarQuantRopeCodec(LinearCodec):
    """Keys of a layer: pair j of a token is `radius_j · (cos angle_j, sin angle_j)`."""

    name: ClassVar[str] = "polarquant_rope"
    Options: ClassVar[type[MethodOptions]] = PolarQuantRopeOptions
    options: PolarQuantRopeOptions
    scale: torch.Tensor
    """The paper's scales per channel, float32 `[H, pairs]`, set with the statistics; scales per group are stored."""

    def __init__(self, options: PolarQuantRopeOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        assert context.rope is not None  # a cache refuses layers without it
        self.pairs, self.codes = context.rope, options.codes
        codes = torch.arange(2**options.angle_bits, device="cpu")
        angles = 2 * math.pi * (codes + self.codes.offset) / 2**options.angle_bits
        self.points = torch.stack([angles.cos(), angles.sin()], -1).to(context.device)
        """Unit vectors of the angle codes, float32 `[2 ** angle_bits, 2]`."""
        self.bounds = quarter_bounds(options.angle_bits).to(context.device)
        if options.radius_scale == "group":
            self.basis = self._build_basis()

    @classmethod
    def layout(cls, options: PolarQuantRopeOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        if side == "values":
            raise ValueError(
                "polarquant_rope for values: only keys have rotary pairs; choose another method for values"
            )
        check_head_dim(cls.name, head_dim, 2 * CODES_PER_WORD, 2 * CODES_PER_WORD)
        pairs = head_dim // 2
        fields = code_fields(options.angle_bits, pairs, "angle_") + code_fields(options.radius_bits, pairs, "radius_")
        if options.radius_scale == "group":
            fields += (Field("scale", torch.float16, (pairs,), options.group_size),)
        return (*fields, Field("match", torch.float16)) if options.scalar == "match" else fields

    @classmethod
    def rope_use(cls, options: PolarQuantRopeOptions, side: Side) -> RopeUse:
        return "pairs"

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure the keys' `mean` `[H, D]`, if centred, and `scale` `[H, pairs]`, if scales are per channel."""
        statistics = super().measure(x, queries)
        if self.options.radius_scale == "channel":
            real, imaginary = self.pairs.split(centred(x, statistics.get("mean")))
            statistics["scale"] = radii(real, imaginary).amax(dim=(0, 2)) / self.codes.steps
        return statistics

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        if self.options.radius_scale == "channel":
            self.scale = statistics["scale"]
            self.basis = self._build_basis()

    def _token_scale(self, stored: Fields) -> torch.Tensor:
        """Scale of every radius, float32, broadcastable to `[B, H, T, pairs]`."""
        if self.options.radius_scale == "channel":
            return self.scale[:, None]
        return stored[0].float().repeat_interleave(self.group, 2)

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        real, imaginary = self.pairs.split(centred(x, self.mean))
        radius = radii(real, imaginary)
        stored: Fields = ()
        if self.options.radius_scale == "group":
            scale = radius.unflatten(2, (-1, self.group)).amax(3) / self.codes.steps
            stored = (scale.clamp(max=SCALE_MAX).to(torch.float16),)
        steps = radius / self._token_scale(stored).clamp_min(1e-30)
        quantize_on = getattr(self.native, "quantize_pairs", quantize)
        bits = self.options.angle_bits, self.options.radius_bits
        fields = (*quantize_on(real, imaginary, steps, self.bounds, *bits), *stored)
        if self.options.scalar == "match":
            length = self._polar(fields)[1].norm(dim=-1).clamp_min(1e-30)
            fields += ((radius.norm(dim=-1) / length).clamp(max=SCALE_MAX).to(torch.float16),)
        return fields

    def _polar(self, fields: Fields) -> tuple[torch.Tensor, torch.Tensor]:
        """Angle codes, int64, and decoded radii, float32, without the factor `match`; each `[B, H, T, pairs]`."""
        options = self.options
        split = len(PLANES[options.angle_bits])
        end = split + len(PLANES[options.radius_bits])
        steps = packing.unpack(fields[split:end], options.radius_bits) + self.codes.offset
        return packing.unpack(fields[:split], options.angle_bits), steps * self._token_scale(fields[end:])

    def _matched(self, fields: Fields, x: torch.Tensor) -> torch.Tensor:
        return x * fields[-1].float()[..., None] if self.options.scalar == "match" else x

    def decode(self, fields: Fields, rope: Rope | None = None) -> torch.Tensor:
        angle, radius = self._polar(fields)
        x = radius[..., None] * self.points[angle]
        x = self._matched(fields, self.pairs.join(x[..., 0], x[..., 1]))
        return x if self.mean is None else x + self.mean[:, None]

    def _build_basis(self) -> torch.Tensor:
        """Rows of code space `[H or 1, D, D]`, real parts, then imaginary ones, times the scales if per channel."""
        unit = torch.eye(self.context.head_dim, device=self.context.device)
        parts = torch.stack(self.pairs.split(unit))  # [2, head_dim, pairs]
        if self.options.radius_scale == "group":
            return parts.transpose(1, 2).flatten(0, 1).unsqueeze(0)
        scaled = parts * self.scale[:, None, None]
        return scaled.transpose(2, 3).flatten(1, 2)

    def parts(self, fields: Fields) -> Iterator[Part]:
        angle, radius = self._polar(fields)
        if self.options.radius_scale == "channel":
            radius = radius / self.scale[:, None].clamp_min(1e-30)
        x = torch.cat([radius * self.points[angle, 0], radius * self.points[angle, 1]], -1)
        yield Part(slice(x.shape[-1]), self._matched(fields, x))

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.polarquant_rope import polarquant_rope_side

        return polarquant_rope_side(self.codes, self.points, self.ready_basis(), self.mean)

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.polarquant_rope import polarquant_rope_encoder

        scale = self.scale if self.options.radius_scale == "channel" else None
        return polarquant_rope_encoder(self.codes, self.pairs, self.bounds, scale, self.mean)

    @cached_property
    def cpu_side(self) -> CPUSide:
        codes = self.codes
        numbers = (codes.angle_bits, codes.radius_bits, codes.tokens, round(2 * codes.offset))
        return cpu_side("pairs", numbers, [self.points], self.ready_basis(), self.mean)
