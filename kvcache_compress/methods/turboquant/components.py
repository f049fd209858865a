"""Scalar-quantized components, whose sum is a TurboQuant vector (see `codec.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.layout import CODES_PER_WORD
from kvcache_compress.codecs.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.codecs.trellis import LEAST_WIDTH, TRELLIS_BITS, trellis_levels

if TYPE_CHECKING:
    from .codec import TurboQuantOptions


@dataclass(frozen=True)
class Component:
    """One scalar-quantized component: `width` codes of `bits` bits along rows `[start, start + width)` of the basis."""

    bits: int
    width: int
    start: int
    channel_set: int
    sketch: bool
    levels: torch.Tensor
    """float32 on the device: `[2 ** bits]` in the order of their codes, or `[2 ** (bits + 1)]` of a trellis."""
    table: torch.Tensor
    """Table of the levels, for `packing.look_up`; the levels themselves of a trellis."""
    trellis: bool = False

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.width)


def channel_sets(bits: float, head_dim: int, outlier_fraction: float) -> tuple[tuple[int, int], ...]:
    """Split `head_dim` channels into sets (width, bits): one for whole bits, else two with outliers first."""
    low = math.floor(bits)
    if bits == low:
        return ((head_dim, low),)
    outliers = round(head_dim * outlier_fraction / CODES_PER_WORD) * CODES_PER_WORD
    outliers = min(max(outliers, CODES_PER_WORD), head_dim - CODES_PER_WORD)
    return ((outliers, low + 1), (head_dim - outliers, low))


def component_bits(options: TurboQuantOptions, bits: int) -> tuple[tuple[int, bool], ...]:
    """Components of one channel set, as (bits, is sketch)."""
    if options.estimator == "mse":
        return ((bits, False),)
    return ((bits - 1, False), (1, True)) if bits > 1 else ((1, True),)


def uses_trellis(options: TurboQuantOptions, width: int, bits: int) -> bool:
    """True if `width` codes of `bits` bits are trellis codes; they pay if they are more than the trellis remembers."""
    chosen = options.estimator == "mse" and options.codebook in (None, "trellis")
    return chosen and bits in TRELLIS_BITS and width >= LEAST_WIDTH


def build_components(
    options: TurboQuantOptions, sets: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Component, ...]:
    """The components of all channel sets `(width, bits)`, in the order of their rows and fields."""
    components: list[Component] = []
    start = 0
    for index, (width, set_bits) in enumerate(sets):
        for bits, sketch in component_bits(options, set_bits):
            trellis = uses_trellis(options, width, bits)
            if sketch:
                levels = torch.tensor([-1.0, 1.0], device="cpu")
            elif options.codebook == "uniform":
                levels = uniform_levels(width, bits).float()
            else:
                levels = (trellis_levels if trellis else lloyd_max_levels)(width, bits).float()
                if bits == 4:  # kernels look these up by magnitude
                    levels = outward(levels)
            levels = levels.to(device)
            table = levels if trellis else packing.level_table(levels, bits)
            components.append(Component(bits, width, start, index, sketch, levels, table, trellis))
            start += width
    return tuple(components)
