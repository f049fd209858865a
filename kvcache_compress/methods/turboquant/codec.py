"""TurboQuant: a random rotation, then the optimal scalar quantizer per coordinate (Zandieh et al., sections 3 and 4.3).

A vector is `norm · z` with z on the unit sphere. After the rotation every coordinate of z has the same known density,
so one exact Lloyd-Max codebook serves all of them. Every variant in the paper is a sum of *components*, each `scale ·
levels[codes]` along rows of a basis. Whole bits take one component, fractional bits two over disjoint channel sets. The
`prod` estimator adds one with levels ±1 along the rows of `S R`, a sketch of the residual.
"""

import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Limits
from pydantic import model_validator

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Rope, Side, Statistics
from kvcache_compress.codecs.layout import CODES_PER_WORD, PLANES, Field, check_head_dim, code_fields
from kvcache_compress.codecs.linear import LinearCodec, Part, spread
from kvcache_compress.codecs.quantizers import trellis
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.codecs.quantizers.scalar import Component, Scalar, quantize
from kvcache_compress.codecs.quantizers.sketch import SketchKind, sketch_constant, sketch_matrix
from kvcache_compress.codecs.transforms.centering import Center, check_for_keys
from kvcache_compress.codecs.transforms.equalization import Equalize
from kvcache_compress.codecs.transforms.rotation import random_rotation
from kvcache_compress.cpu_kernels.common.operands import CPUSide, cpu_side
from kvcache_compress.methods.registry import register_method

Estimator = Literal["mse", "prod"]
Codebook = Literal["trellis", "lloyd_max", "uniform"]


class TurboQuantOptions(MethodOptions):
    """Options of `turboquant`, for one side.

    Attributes:
        bits: 1 to 6 in steps of 0.5; a fractional value codes `outlier_fraction` of the channels with one more bit.
        estimator: `mse` (Algorithm 1), or `prod` (Algorithm 2), which spends one bit on a sketch of the residual.
        scalar: number stored per token: `norm` (the paper's), `match` (default for keys) or `unbiased` (default for
            values).
        shared_rotation: use one rotation for all layers.
        codebook: `trellis` (default except for `prod`) loses a fifth to a third less than the paper's `lloyd_max` at 1
            to 3 bits, but encodes and decodes more slowly; more bits use Lloyd-Max levels with it. `uniform`: evenly
            spaced levels.
        center: subtract the mean key of the first prefill; `auto`: where it is large and sinks stay dense.
        equalize: `auto` divides outlier channels of keys by a factor before the rotation, if sinks stay dense.
        outlier_fraction: share of channels with one more bit, for fractional bits.
        sketch: sketch of `prod`: `orthogonal` or `gaussian`.
    """

    bits: Annotated[float, Limits(ge=1, le=6, multiple_of=0.5)] = 4
    estimator: Estimator = "mse"
    scalar: Scalar | None = None
    shared_rotation: bool = False
    codebook: Codebook | None = None
    center: Center | None = None
    equalize: Equalize | None = None
    outlier_fraction: Annotated[float, Limits(gt=0, lt=1)] = 0.5
    sketch: SketchKind = "orthogonal"

    @model_validator(mode="after")
    def _check_estimator(self) -> "TurboQuantOptions":
        if self.estimator == "prod" and self.scalar not in (None, "norm"):
            raise ValueError(f"scalar={self.scalar!r} for turboquant must be 'norm' with estimator 'prod'")
        if self.estimator == "prod" and self.codebook == "trellis":
            raise ValueError("codebook='trellis' for turboquant must be 'lloyd_max' or 'uniform' with estimator 'prod'")
        return self

    def idle(self) -> dict[str, str]:
        idle = {} if self.bits % 1 else {"outlier_fraction": "fractional bits"}
        if self.estimator == "mse":
            idle["sketch"] = "estimator 'prod'"
        scalar_bits = math.ceil(self.bits) - (self.estimator == "prod")
        if scalar_bits <= 1 and (self.estimator == "prod" or self.codebook == "uniform"):
            idle["codebook"] = "more bits"
        return idle


class ComponentCodec(LinearCodec):
    """Base of codecs whose tokens are sums of components, each with its codes and a scale in the fields."""

    in_memory_order: ClassVar[bool] = True
    words_at_once: ClassVar[int] = 0
    """Words of a token's one-bit codes that Triton unpacks at a time; 0 for all."""
    components: tuple[Component, ...]

    def parts(self, fields: Fields) -> Iterator[Part]:
        at = 0
        for component in self.components:
            planes = len(PLANES[component.bits])
            look_up = trellis.look_up if component.trellis else packing.look_up
            levels = look_up(fields[at : at + planes], component.bits, component.table)
            yield Part(component.rows, levels, fields[at + planes].float())
            at += planes + 1

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.turboquant import turboquant_side

        return turboquant_side(self.context.side, self.components, self.ready_basis(), self.mean, self.words_at_once)

    @cached_property
    def cpu_side(self) -> CPUSide:
        bits, levels = (c.bits for c in self.components), (c.levels for c in self.components)
        return cpu_side("levels", bits, levels, self.ready_basis(), self.mean)


@register_method
class TurboQuantCodec(ComponentCodec):
    """One side of a layer under TurboQuant."""

    name: ClassVar[str] = "turboquant"
    Options: ClassVar[type[MethodOptions]] = TurboQuantOptions
    options: TurboQuantOptions
    bit_choices: ClassVar[tuple[float, ...]] = (1, 2, 3, 4, 5, 6)
    set_rows: tuple[torch.Tensor, ...]
    """Rows of the basis of each channel set; with two sets they are set with the statistics."""

    def __init__(self, options: TurboQuantOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        default: Scalar = "unbiased" if context.side == "values" else "match"
        self.scalar: Scalar = "norm" if options.estimator == "prod" else options.scalar or default
        self.sets = channel_sets(options.bits, context.head_dim, options.outlier_fraction)
        self.components = build_components(options.estimator, options.codebook, self.sets, context.device)
        # Rotations R and, for `prod`, sketches S of the channel sets, each float32 `[width, width]`.
        seed_of, device = partial(context.seed_of, shared=options.shared_rotation), context.device
        self._rotations: list[torch.Tensor] = []
        self._sketches: list[torch.Tensor] = []
        for index, (width, _) in enumerate(self.sets):
            self._rotations.append(random_rotation(width, seed_of(f"rotation {index}")).to(device))
            if options.estimator == "prod":
                self._sketches.append(sketch_matrix(options.sketch, width, seed_of(f"sketch {index}")).to(device))
        if len(self.sets) == 1:
            self._set_basis(None)

    @classmethod
    def layout(cls, options: TurboQuantOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        check_head_dim(cls.name, head_dim, CODES_PER_WORD, 2 * CODES_PER_WORD)
        check_for_keys(cls.name, side, center=options.center, equalize=options.equalize)
        sets = channel_sets(options.bits, head_dim, options.outlier_fraction)
        fields: tuple[Field, ...] = ()
        for index, (width, set_bits) in enumerate(sets):
            prefix = "outlier_" if len(sets) == 2 and index == 0 else ""
            for bits, sketch in component_bits(options.estimator, set_bits):
                part = f"{prefix}{'sketch_' if sketch else ''}"
                fields += (*code_fields(bits, width, part), Field(f"{part}scale", torch.float16))
        return fields

    def _set_basis(self, order: torch.Tensor | None) -> None:
        """Build the basis; `order` `[H, head_dim]` has each head's channels, outliers first; None for one set."""
        if order is None:
            rows = [rotation.unsqueeze(0) for rotation in self._rotations]
        else:
            channels = order.split([width for width, _ in self.sets], -1)
            rows = [spread(*pair, self.context.head_dim) for pair in zip(self._rotations, channels, strict=True)]
        parts = ((c, rows[c.channel_set]) for c in self.components)
        self.basis = torch.cat([self._sketches[c.channel_set] @ x if c.sketch else x for c, x in parts], 1)
        kept = {c.channel_set: self.basis[:, c.rows] for c in self.components if not c.sketch}
        self.set_rows = tuple(kept.get(index, row) for index, row in enumerate(rows))
        if order is None:
            self._rotations = []

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure `mean` and `factors` of keys, and for fractional bits the `energy` `[H, D]` of equalized channels."""
        statistics = super().measure(x, queries)
        if len(self.sets) == 2:
            statistics["energy"] = self.equalize(x, statistics).square().mean(dim=(0, 2))
        return statistics

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        if len(self.sets) == 2:
            self._set_basis(statistics["energy"].argsort(dim=-1, descending=True, stable=True))

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        x = self.equalize(x, self.statistics)
        fields: Fields = ()
        for index, rows in enumerate(self.set_rows):
            rotated = x @ rows.mT
            norm = rotated.norm(dim=-1)
            residual = direction = rotated / norm.clamp_min(1e-30)[..., None]
            for component in self.components:
                if component.channel_set != index:
                    continue
                if component.sketch:
                    length = residual.norm(dim=-1) * norm * sketch_constant(self.options.sketch, component.width)
                    sketched = residual @ self._sketches[index].mT
                    fields += self._quantized(component, sketched, length, "norm")
                else:
                    part = self._quantized(component, direction, norm, self.scalar)
                    fields += part
                    if self._sketches:
                        point = packing.look_up(part[:-1], component.bits, component.table)
                        residual = direction - packing.channel_order(point)
        return fields

    def _quantized(self, component: Component, z: torch.Tensor, norm: torch.Tensor, scalar: Scalar) -> Fields:
        name, function = ("quantize_trellis", trellis.quantize) if component.trellis else ("quantize_levels", quantize)
        return getattr(self.native, name, function)(z, norm, component.levels, component.bits, scalar)

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.turboquant import turboquant_encoder

        if self._sketches:
            return None
        rows = [self.encoding_rows(rows) for rows in self.set_rows]
        return turboquant_encoder(self.components, rows, self.scalar, self.mean)


def channel_sets(bits: float, head_dim: int, outlier_fraction: float) -> tuple[tuple[int, int], ...]:
    """Split `head_dim` channels into sets (width, bits): one for whole bits, else outliers first, then the others."""
    low = math.floor(bits)
    if bits == low:
        return ((head_dim, low),)
    outliers = round(head_dim * outlier_fraction / CODES_PER_WORD) * CODES_PER_WORD
    outliers = min(max(outliers, CODES_PER_WORD), head_dim - CODES_PER_WORD)
    return ((outliers, low + 1), (head_dim - outliers, low))


def component_bits(estimator: Estimator, bits: int) -> tuple[tuple[int, bool], ...]:
    """Components of one channel set, as (bits, is sketch)."""
    if estimator == "mse":
        return ((bits, False),)
    return ((bits - 1, False), (1, True)) if bits > 1 else ((1, True),)


def build_components(
    estimator: Estimator, codebook: Codebook | None, sets: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Component, ...]:
    """Components of all channel sets `(width, bits)`, in the order of their rows and fields."""
    components: list[Component] = []
    start, wanted = 0, estimator == "mse" and codebook in (None, "trellis")
    for index, (width, set_bits) in enumerate(sets):
        for bits, sketch in component_bits(estimator, set_bits):
            coded = wanted and bits in trellis.TRELLIS_BITS and width >= trellis.LEAST_WIDTH
            even = codebook == "uniform" or (bits == 1 and not coded)
            if sketch:
                levels = torch.tensor([-1.0, 1.0], device="cpu")
            elif codebook == "uniform":
                levels = uniform_levels(width, bits).float()
            else:
                levels = (trellis.trellis_levels if coded else lloyd_max_levels)(width, bits).float()
                if bits == 4:  # kernels look these up by magnitude
                    levels = outward(levels)
            levels = levels.to(device)
            table = levels if coded else packing.level_table(levels, bits)
            components.append(Component(bits, width, start, index, sketch, levels, table, even, coded))
            start += width
    return tuple(components)
