"""Recursive PolarQuant: angles of a tree of radii (Han et al., arXiv 2502.02617, sections 3 and 4.1).

The numbers of a randomly rotated vector are paired to (radius, angle), the radii are paired again, and so on for
`levels` levels. Angles are stored as codes, the remaining radii in 16 or 8 bits. After the rotation each level's angles
have a known density, narrower at each level, so no zero point or scale is needed. Every code point has norm 1, so
`norm` preserves norms and `match` is the same.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field as Limits
from pydantic import field_validator

from kvcache_compress.codecs.base import CodecContext, Fields, MethodOptions, Rope, Side, Statistics
from kvcache_compress.codecs.layout import Field, check_head_dim
from kvcache_compress.codecs.linear import LinearCodec, Part
from kvcache_compress.codecs.quantizers import polar_tree
from kvcache_compress.codecs.quantizers.polar_tree import AngleCodebook
from kvcache_compress.codecs.quantizers.scalar import SCALE_MAX, Scalar
from kvcache_compress.codecs.transforms.centering import Center, check_for_keys
from kvcache_compress.codecs.transforms.equalization import Equalize
from kvcache_compress.codecs.transforms.rotation import random_rotation
from kvcache_compress.cpu_kernels.common.operands import CPUSide, cpu_side
from kvcache_compress.methods.registry import register_method
from kvcache_compress.validation import AnyTuple

from .codebooks import make_codebook, offline_codebook, online_codebook

RADIUS_CODES = 256
OCTAVES_BELOW, OCTAVES_ABOVE = 6.0, 4.0
"""Margins of 8-bit radii, in octaves, below and above the radii of the first prefill, for later tokens that differ."""


class PolarQuantRecursiveOptions(MethodOptions):
    """Options of `polarquant_recursive`, for one side.

    Attributes:
        levels: levels of the tree, each halving the number of radii; by default as many as the head dimension allows (7
            for 128).
        bits: bits per angle, 1 to 6, from level 1 on. The last number holds for all deeper levels.
        radius_bits: 16 (the paper's), or 8: a logarithmic code per head, from 1/64 of the smallest radius of the first
            prefill to 16 times the largest. Smaller radii become zero.
        precondition: rotate first (the paper's PolarQuant-R); otherwise neighbouring channels are paired unrotated.
        shared_rotation: use one rotation for all layers.
        codebook: `offline`, optimal for the exact densities, or `online`, k-means++ on the angles of the first tokens,
            of all rows of a batch together.
        scalar: scale of the radii: `match` (default for keys) keeps the norm, `unbiased` (default for values) inner
            products.
        center: subtract the mean key of the first prefill; `auto`: where it is large and sinks stay dense.
        equalize: `auto` divides outlier channels of keys by a factor before the rotation, if sinks stay dense.
    """

    levels: Annotated[int, Limits(ge=1)] | None = None
    bits: Annotated[AnyTuple[Annotated[int, Limits(ge=1, le=6)]], Limits(min_length=1)] = (4, 3, 2)
    radius_bits: Literal[8, 16] = 8
    precondition: bool = True
    shared_rotation: bool = False
    codebook: Literal["offline", "online"] = "offline"
    scalar: Scalar | None = None
    center: Center | None = None
    equalize: Equalize | None = None

    @field_validator("bits", mode="before")
    @classmethod
    def _one_for_all(cls, bits: Any) -> Any:
        return bits if isinstance(bits, (list, tuple)) else (bits,)

    def idle(self) -> dict[str, str]:
        return {} if self.precondition else {"shared_rotation": "precondition: true"}

    def level_bits(self, head_dim: int) -> tuple[int, ...]:
        """Bits of each level for this head dimension."""
        check_head_dim("polarquant_recursive", head_dim, 16, 32)
        most = (head_dim & -head_dim).bit_length() - 1  # until an odd number of radii remains
        levels = most if self.levels is None else self.levels
        if levels > most:
            raise ValueError(
                f"levels={levels} for polarquant_recursive must be at most {most}: {head_dim} halves no more often"
            )
        if len(self.bits) > levels:
            raise ValueError(
                f"bits={list(self.bits)} for polarquant_recursive must have at most {levels} numbers, one per level"
            )
        return self.bits + self.bits[-1:] * (levels - len(self.bits))


@register_method
class PolarQuantRecursiveCodec(LinearCodec):
    """One side of a layer under recursive PolarQuant."""

    name: ClassVar[str] = "polarquant_recursive"
    Options: ClassVar[type[MethodOptions]] = PolarQuantRecursiveOptions
    options: PolarQuantRecursiveOptions
    books: tuple[AngleCodebook, ...]
    """Codebooks of the levels; `online` ones are set with the statistics."""

    def __init__(self, options: PolarQuantRecursiveOptions, context: CodecContext) -> None:
        super().__init__(options, context)
        bits = options.level_bits(context.head_dim)
        self.tree = polar_tree.polar_tree(context.head_dim, bits)
        default: Scalar = "unbiased" if context.side == "values" else "match"
        self.scalar: Scalar = options.scalar or default
        if options.codebook == "offline":
            books = (offline_codebook(level, width) for level, width in enumerate(bits, 1))
            self.books = tuple(book.to(context.device) for book in books)
        self.radius_table: torch.Tensor | None = None
        """Radii of 8-bit codes, float32 `[H, 256]`, rounded to 16 bits; code 0 is a radius of zero."""
        self.basis = self._build_basis().to(context.device)

    @classmethod
    def layout(cls, options: PolarQuantRecursiveOptions, side: Side, head_dim: int) -> tuple[Field, ...]:
        bits = options.level_bits(head_dim)
        check_for_keys(cls.name, side, center=options.center, equalize=options.equalize)
        radius = torch.float16 if options.radius_bits == 16 else torch.uint8
        return polar_tree.polar_tree(head_dim, bits).fields(radius)

    def _build_basis(self) -> torch.Tensor:
        """Basis of code space, float32 `[1, D, D]`: the rotation, with rows in the order of `adjacent_order`."""
        dim = self.context.head_dim
        basis = torch.eye(dim, device="cpu")
        if self.options.precondition:
            seed = self.context.seed_of("rotation", self.options.shared_rotation)
            basis = random_rotation(dim, seed)
        return basis[None, polar_tree.adjacent_order(dim, len(self.tree.levels))]

    def measure(self, x: torch.Tensor, queries: torch.Tensor | None = None) -> Statistics:
        """Measure `mean` and `factors` of keys, `angles1`, ... of online codebooks, and the range of 8-bit radii."""
        statistics = super().measure(x, queries)
        y = self._to_code_space(x, statistics)
        if self.options.codebook == "online":
            angles = polar_tree.angles(y, len(self.tree.levels))
            for index, (level, values) in enumerate(zip(self.tree.levels, angles, strict=True)):
                seed = self.context.seed_of(f"angles {index}")
                book = online_codebook(values.flatten(), level.bits, index == 0, seed)
                statistics[f"angles{index + 1}"] = book.angles
        if self.options.radius_bits == 8:
            statistics |= radius_range(y.unflatten(-1, (-1, self.tree.roots)).norm(dim=-2))
        return statistics

    def set_statistics(self, statistics: Statistics) -> None:
        super().set_statistics(statistics)
        if self.options.codebook == "online":
            angles = (statistics[f"angles{index + 1}"].cpu() for index in range(len(self.tree.levels)))
            books = (make_codebook(values, circular=index == 0) for index, values in enumerate(angles))
            self.books = tuple(book.to(self.context.device) for book in books)
        if self.options.radius_bits == 8:
            least, step = statistics["least_log_radius"], statistics["log_radius_step"]
            codes = torch.arange(RADIUS_CODES, device=least.device)
            table = torch.exp2(least[:, None] + step[:, None] * (codes - 1)).clamp(max=SCALE_MAX)
            self.radius_table = torch.where(codes > 0, table, 0.0).half().float()

    def _to_code_space(self, x: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        return self.equalize(x, statistics) @ self.basis[0].mT

    def encode(self, x: torch.Tensor, rope: Rope | None = None) -> Fields:
        y = self._to_code_space(x, self.statistics)
        encode = getattr(self.native, "quantize_tree", polar_tree.encode)
        planes, energy, cross = encode(y, self.tree, self.books)
        radii = energy / cross.clamp_min(1e-30) if self.scalar == "unbiased" else energy.sqrt()
        return (*planes, self._store_radii(radii))

    def _radius_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log2 of the radius of code 1, and the step per code, each `[H]`."""
        return self.statistics["least_log_radius"], self.statistics["log_radius_step"]

    def _store_radii(self, radii: torch.Tensor) -> torch.Tensor:
        if self.options.radius_bits == 16:
            return radii.clamp(max=SCALE_MAX).to(torch.float16)
        least, step = (x[:, None, None] for x in self._radius_range())
        codes = ((radii.log2() - least) / step).round() + 1
        return torch.where(radii > 0, codes.clamp(0, RADIUS_CODES - 1), 0).to(torch.uint8)

    def _radii(self, stored: torch.Tensor) -> torch.Tensor:
        """Decode radii to float32 `[B, H, T, roots]`."""
        if self.radius_table is None:
            return stored.float()
        heads = torch.arange(stored.shape[1], device=stored.device)[:, None, None]
        return self.radius_table[heads, stored.long()]

    def parts(self, fields: Fields) -> Iterator[Part]:
        codes, radii = polar_tree.unpack(self.tree, fields), self._radii(fields[-1])
        yield Part(slice(self.context.head_dim), polar_tree.expand(codes, radii, self.books))

    @cached_property
    def kernel_side(self) -> Any:
        from kvcache_compress.triton_kernels.decode.polarquant_recursive import polarquant_recursive_side

        basis = self.ready_basis()
        return polarquant_recursive_side(self.context.side, self.tree, self.books, basis, self.radius_table, self.mean)

    @cached_property
    def kernel_encoder(self) -> Any:
        from kvcache_compress.triton_kernels.encode.polarquant_recursive import polarquant_recursive_encoder

        rows = self.encoding_rows(self.basis)
        radii = torch.stack(self._radius_range(), -1) if self.options.radius_bits == 8 else None
        return polarquant_recursive_encoder(self.tree, self.books, rows, self.scalar, radii, self.mean)

    @cached_property
    def cpu_side(self) -> CPUSide:
        tables = [book.points for book in self.books]
        if self.radius_table is not None:
            tables.append(self.radius_table)
        return cpu_side("tree", self.tree.places, tables, self.ready_basis(), self.mean)


def radius_range(radii: torch.Tensor) -> Statistics:
    """log2 of the radius of code 1 and the step per code, each `[H]`, for radii `[B, H, T, roots]`.

    Codes are evenly spaced from the smallest to the largest radius, with a margin at either end.
    """
    logs = radii.log2().transpose(0, 1).flatten(1)
    least = torch.where(logs.isfinite(), logs, torch.inf).amin(-1)
    least = torch.where(least.isfinite(), least, 0.0)
    octaves = OCTAVES_BELOW + (logs.amax(-1) - least).clamp_min(0) + OCTAVES_ABOVE
    return {"least_log_radius": least - OCTAVES_BELOW, "log_radius_step": octaves / (RADIUS_CODES - 2)}
