"""The scalar-quantized components that add up to a TurboQuant vector (see `codec.py`)."""

import math
from typing import Literal

import torch

from kvcache_compress.codecs import packing
from kvcache_compress.codecs.layout import CODES_PER_WORD
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels, outward, uniform_levels
from kvcache_compress.codecs.quantizers.scalar import Component
from kvcache_compress.codecs.quantizers.trellis import LEAST_WIDTH, TRELLIS_BITS, trellis_levels

Estimator = Literal["mse", "prod"]
Codebook = Literal["trellis", "lloyd_max", "uniform"]


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
            trellis = wanted and bits in TRELLIS_BITS and width >= LEAST_WIDTH
            even = codebook == "uniform" or (bits == 1 and not trellis)
            if sketch:
                levels = torch.tensor([-1.0, 1.0], device="cpu")
            elif codebook == "uniform":
                levels = uniform_levels(width, bits).float()
            else:
                levels = (trellis_levels if trellis else lloyd_max_levels)(width, bits).float()
                if bits == 4:  # kernels look these up by magnitude
                    levels = outward(levels)
            levels = levels.to(device)
            table = levels if trellis else packing.level_table(levels, bits)
            components.append(Component(bits, width, start, index, sketch, levels, table, even, trellis))
            start += width
    return tuple(components)
