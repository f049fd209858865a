"""QJL (Zandieh et al., arXiv 2406.03482): keys as a norm and the signs of a random sketch.

With a sketch S of m rows (Definition 3.1), a key k is stored as `sign(S k)` and `c ‖k‖`. The estimate of q·k is `c ‖k‖
⟨S q, sign(S k)⟩`, unbiased for the right c (Lemma 3.2). Channels with large norms can have their own sketch and norm
(section 4.2), so that they do not dominate the error of all channels.
"""

from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Limits
from pydantic import field_validator

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Rope, Side, Statistics
from kvcache_compress.codecs.layout import CODES_PER_WORD, Field, code_fields
from kvcache_compress.codecs.linear import spread
from kvcache_compress.codecs.quantizers.scalar import Component, quantize
from kvcache_compress.codecs.quantizers.sketch import SketchKind, sketch_constant, sketch_matrix
from kvcache_compress.codecs.transforms.centering import Center
from kvcache_compress.codecs.transforms.equalization import Equalize
from kvcache_compress.methods.registry import register_method
from kvcache_compress.methods.turboquant.codec import ComponentCodec

MAX_RATIO = 4
MIN_OUTLIERS = 4
"""Fewest outlier channels; with fewer, an orthogonal sketch has few distinct sign patterns."""


class QJLOptions(MethodOptions):
    """Options of `qjl`, for keys.

    Attributes:
        sketch_ratio: sketch rows per channel, up to 4; their number is rounded to a multiple of 8.
        sketch: `orthogonal` stacks rotations, `gaussian` has independent rows.
        shared_sketch: use one sketch for all layers.
        outlier_channels: channels per head with a sketch of their own, of as many rows as a head has channels: those
            with the largest norm in the first prefill.
        scalar: number stored per token: `norm` (the paper's), or `match`, which keeps the key's norm.
        center: subtract the mean key of the first prefill; `auto`: where it is large and sinks stay dense.
        equalize: `auto` divides outlier channels by a factor before the sketch, if sinks stay dense and no channels
            have their own sketch.
    """

    sketch_ratio: Annotated[float, Limits(gt=0, le=MAX_RATIO)] = 2
    sketch: SketchKind = "orthogonal"
    shared_sketch: bool = False
    outlier_channels: int = 0
    scalar: Literal["norm", "match"] = "match"
    center: Center = "auto"
    equalize: Equalize = "auto"

    @field_validator("outlier_channels")
    @classmethod
    def _check_outliers(cls, count: int) -> int:
        if count and count < MIN_OUTLIERS:
            raise ValueError(f"outlier_channels={count} for qjl must be 0 or at least {MIN_OUTLIERS}")
        return count

    def idle(self) -> dict[str, str]:
        return {"equalize": "no outlier_channels"} if self.outlier_channels else {}


def sketches(options: QJLOptions, head_dim: int) -> tuple[tuple[int, int], ...]:
    """Rows and channels of the sketch of the inlier channels, then of that of the outlier channels, if any."""
    outliers = options.outlier_channels
    if outliers >= head_dim:
        raise ValueError(f"outlier_channels={outliers} for qjl must be below the head dimension {head_dim}")
    rows = max(1, round(options.sketch_ratio * head_dim / CODES_PER_WORD)) * CODES_PER_WORD
    outlier_rows = -(-head_dim // CODES_PER_WORD) * CODES_PER_WORD
    return ((rows, head_dim - outliers), (outlier_rows, outliers)) if outliers else ((rows, head_dim),)


@register_method
class QJLCodec(ComponentCodec):
    """Keys of a layer under QJL."""

    name: ClassVar[str] = "qjl"
    Options: ClassVar[type[MethodOptions]] = QJLOptions
    options: QJLOptions
    words_at_once: ClassVar[int] = 16  # 512 signs at once would spill registers

    def __init__(self, options: QJLOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        self.equalized &= not options.outlier_channels
        self.sketches = sketches(options, context.head_dim)
        seed_of = partial(context.seed_of, shared=options.shared_sketch)
        self._matrices = tuple(
            sketch_matrix(options.sketch, channels, seed_of(f"sketch {index}"), rows).to(context.device)
            for index, (rows, channels) in enumerate(self.sketches)
        )
        levels = torch.tensor([-1.0, 1.0], device=context.device)
        table, starts = packing.level_table(levels, 1), (0, self.sketches[0][0])
        self.components = tuple(
            Component(1, rows, start, index, True, levels, table, even=True, trellis=False)
            for index, ((rows, _), start) in enumerate(zip(self.sketches, starts, strict=False))
        )
        self.members: torch.Tensor | None = None
        if not options.outlier_channels:
            self.basis = self._matrices[0].unsqueeze(0)

    @classmethod
    def layout(cls, options: QJLOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        if side == "values":
            raise ValueError("qjl for values: it estimates products with queries, so only keys can use it")
        fields: tuple[Field, ...] = ()
        for (rows, _), prefix in zip(sketches(options, head_dim), ("", "outlier_"), strict=False):
            fields += (*code_fields(1, rows, prefix), Field(f"{prefix}scale", torch.float16))
        return fields

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure `mean` and `factors`, and the channels' `energy` `[H, D]` if some have a sketch of their own."""
        statistics = super().measure(x, queries)
        if self.options.outlier_channels:
            statistics["energy"] = self.equalize(x, statistics).square().sum(dim=(0, 2))
        return statistics

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        if self.options.outlier_channels:
            order = statistics["energy"].argsort(dim=-1, stable=True)
            by_sketch = [x.sort(-1).values for x in order.split([channels for _, channels in self.sketches], -1)]
            self.members = torch.stack([torch.zeros_like(statistics["energy"]).scatter_(1, x, 1.0) for x in by_sketch])
            parts = zip(self._matrices, by_sketch, strict=True)
            self.basis = torch.cat([spread(matrix, x, self.context.head_dim) for matrix, x in parts], 1)
            self._matrices = ()

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        x = self.equalize(x, self.statistics)
        quantize_on = getattr(self.native, "quantize_levels", quantize)
        fields: Fields = ()
        for index, component in enumerate(self.components):
            basis = self.basis[:, component.rows]
            sketched = x @ basis.mT
            norm = (x if self.members is None else x * self.members[index][:, None]).norm(dim=-1)
            if self.options.scalar == "norm":
                stored = norm * self._constants[index]
            else:
                signs = (sketched > 0).float() * 2 - 1
                stored = norm / (signs @ basis).norm(dim=-1).clamp_min(1e-30)
            fields += quantize_on(sketched, stored, component.levels, 1, "norm")
        return fields

    @property
    def _constants(self) -> list[float]:
        """Factor of each sketch's norm for unbiased scores."""
        return [sketch_constant(self.options.sketch, channels, rows) for rows, channels in self.sketches]

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.qjl import qjl_encoder

        sketches = [(c.width, constant) for c, constant in zip(self.components, self._constants, strict=True)]
        weights = self.members if self.factors is None else 1 / self.factors[None]
        match = self.options.scalar == "match"
        return qjl_encoder(self.encoding_rows(self.basis), sketches, match, self.mean, weights)
