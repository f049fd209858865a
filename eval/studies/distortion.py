"""Distortion of TurboQuant against its theory, on real embeddings (TurboQuant, section 4.1).

For base vectors x and queries y on the unit sphere, each estimator decodes x to x̃ with several random rotations. The
error of a pair is ⟨x̃, y⟩ - ⟨x, y⟩; its mean is the bias. Squared errors of inner products are given times d, so that
they compare across dimensions. Bounds (Theorems 1 to 3): 4^-b to √3π/2 · 4^-b on the mean squared error of x,
4^-b to √3π² · 4^-b on d times that of its inner product with any one y, in expectation over the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.eval.provenance.artifacts import save_figure
from kvcache_compress.eval.reporting.drawing import COLORS, MARKERS, new_figure, style
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions

ESTIMATORS: dict[str, dict[str, Any]] = {
    "mse, norm (paper)": {"codebook": "lloyd_max", "scalar": "norm"},
    "mse, unbiased": {"codebook": "lloyd_max", "scalar": "unbiased"},
    "prod, Gaussian S (paper)": {"estimator": "prod", "sketch": "gaussian"},
    "prod, orthogonal S": {"estimator": "prod"},
}
"""Options of each estimator besides its bits and a uniformly random rotation."""
ERROR_BINS = 80
PRODUCT_BINS = 8
MSE_BOUNDS = (1.0, math.sqrt(3) * math.pi / 2)
PRODUCT_BOUNDS = (1.0, math.sqrt(3) * math.pi**2)
"""Lower and upper bound on the error, times 4^-bits; on the product's error also times 1 / d."""


@dataclass(frozen=True)
class ProductBin:
    """Pairs whose true inner product is in one range: its mean, and mean and standard deviation of the error."""

    product: float
    bias: float
    std: float
    pairs: int


@dataclass(frozen=True)
class Distortion:
    """One estimator at one bit width on embeddings.

    Attributes:
        estimator: a name from `ESTIMATORS`.
        bits: nominal; `stored_bits` per number include scales.
        mse: mean squared error of a unit vector.
        product_error: mean squared error of an inner product, times the dimension.
        bias: mean error of an inner product.
        least, greatest: errors of inner products; `density` is their histogram, equal bins that integrate to one.
        by_product: bias and spread by the true inner product, in ranges of equally many pairs.
    """

    estimator: str
    bits: int
    stored_bits: float
    mse: float
    product_error: float
    bias: float
    least: float
    greatest: float
    density: list[float] = field(repr=False)
    by_product: list[ProductBin] = field(repr=False)


def estimator_codec(name: str, bits: int, dim: int, seed: int) -> TurboQuantCodec:
    """Codec of one of `ESTIMATORS`."""
    options = TurboQuantOptions(bits=bits, rotation="haar", **ESTIMATORS[name])
    return TurboQuantCodec(options, CodecContext("values", dim, 1, 0, seed, 0, torch.float32, torch.device("cpu")))


def measure_distortion(
    base: torch.Tensor,
    queries: torch.Tensor,
    bits: Sequence[int],
    *,
    seeds: int = 4,
    on_progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[Distortion]:
    """Measure every estimator at every bit width, over all pairs of a base vector and a query.

    Args:
        base: unit vectors `[N, d]`, which are compressed.
        queries: unit vectors `[M, d]`; M · N · `seeds` errors are held at once.
        bits: bit widths, 1 to 6.
        seeds: random rotations.
        on_progress: called with measurements done, measurements in all, and the next one's label.

    Raises:
        ValueError: bits that are not allowed, no seeds, or a dimension that TurboQuant cannot take.
    """
    if not bits or not all(1 <= number <= 6 for number in bits):
        raise ValueError(f"bits={list(bits)}: must be whole numbers from 1 to 6, at least one")
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: must be at least 1")
    products = queries @ base.T
    order = products.flatten().sort().values
    inner = torch.arange(1, PRODUCT_BINS) * order.numel() // PRODUCT_BINS
    ranges = torch.bucketize(products, order[inner], right=True)
    todo = [(name, number) for number in dict.fromkeys(bits) for name in ESTIMATORS]
    rows = []
    for done, (name, number) in enumerate(todo):
        on_progress(done, len(todo), f"{name}, {number} bits")
        codecs = [estimator_codec(name, number, base.shape[1], seed) for seed in range(seeds)]
        errors = [codec.decode(codec.encode(base[None, None]))[0, 0] - base for codec in codecs]
        of_products = torch.stack([queries @ error.T for error in errors])
        density, edges = torch.histogram(of_products.flatten(), ERROR_BINS, density=True)
        rows.append(
            Distortion(
                estimator=name,
                bits=number,
                stored_bits=codecs[0].bits_per_number(),
                mse=sum(error.square().sum(1).mean().item() for error in errors) / seeds,
                product_error=of_products.double().square().mean().item() * base.shape[1],
                bias=of_products.double().mean().item(),
                least=edges[0].item(),
                greatest=edges[-1].item(),
                density=[float(f"{height:.4g}") for height in density.tolist()],
                by_product=list(_by_product(products, ranges, of_products)),
            )
        )
    on_progress(len(todo), len(todo), "distortion")
    return rows


def _by_product(products: torch.Tensor, ranges: torch.Tensor, errors: torch.Tensor) -> Iterator[ProductBin]:
    for index in range(PRODUCT_BINS):
        chosen = ranges == index
        if pairs := int(chosen.sum()):
            of_range = errors[:, chosen].double()
            spread = of_range.std(correction=0).item()
            yield ProductBin(products[chosen].double().mean().item(), of_range.mean().item(), spread, pairs)


def plot_distortion(rows: Sequence[Distortion], path: Path) -> None:
    """The paper's Figures 1 to 3: a column of panels per bit width, with histograms of errors and biases by inner
    product, and errors of products and vectors against bits between their bounds."""
    widths = sorted({row.bits for row in rows})
    with style():
        figure = new_figure(max(8, 2.7 * len(widths)), 8)
        panels = figure.subplots(3, max(2, len(widths)), squeeze=False)
        for ax in (*panels[:2, len(widths) :].flat, *panels[2, 2:]):
            ax.set_axis_off()
        for name, color, marker in zip(ESTIMATORS, COLORS, MARKERS, strict=False):
            of_name = sorted((row for row in rows if row.estimator == name), key=lambda row: row.bits)
            for row, errors, bias in zip(of_name, panels[0], panels[1], strict=False):
                edges = torch.linspace(row.least, row.greatest, len(row.density) + 1).tolist()
                errors.stairs(row.density, edges, color=color, label=name)
                errors.set(title=f"{row.bits} bits", xlabel="error of the inner product", yticks=[])
                bias.plot([b.product for b in row.by_product], [b.bias for b in row.by_product], marker, color=color)
                bias.set(xlabel="inner product", ylabel="mean error")
            heights = ([row.product_error for row in of_name], [row.mse for row in of_name])
            for ax, of_bits in zip(panels[2], heights, strict=False):
                ax.plot([row.bits for row in of_name], of_bits, color=color, marker=marker)
        titles = "squared error of products, times d", "squared error of unit vectors"
        for ax, title, bounds in zip(panels[2], titles, (PRODUCT_BOUNDS, MSE_BOUNDS), strict=False):
            for bound, line in zip(bounds, (":", "--"), strict=True):
                ax.plot(widths, [bound * 4.0**-bits for bits in widths], color="black", ls=line)
            ax.set(title=f"{title}, and its bounds", xlabel="bits", yscale="log", xticks=widths)
        figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        save_figure(figure, path)
