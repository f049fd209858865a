"""Errors of TurboQuant's estimators on random unit vectors and on embeddings, as defined in `distortion.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcache_compress.codecs.base import CodecContext
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


def unit_vectors(count: int, dim: int, seed: int) -> torch.Tensor:
    """Random unit vectors, float32 `[1, 1, count, dim]`."""
    x = torch.randn(1, 1, count, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def estimator_options(name: str, bits: int) -> TurboQuantOptions:
    """Options of one of `ESTIMATORS`."""
    return TurboQuantOptions(bits=bits, rotation="haar", **ESTIMATORS[name])


def _codec(options: TurboQuantOptions, dim: int, seed: int) -> TurboQuantCodec:
    return TurboQuantCodec(options, CodecContext("values", dim, 1, 0, seed, 0, torch.float32, torch.device("cpu")))


def measure_random(options: TurboQuantOptions, dim: int, vectors: int, seeds: int) -> tuple[float, float, float]:
    """Measure an estimator on random unit vectors.

    Returns:
        Mean squared error of a vector, `dim` times that of its inner product with another, and the product's bias.

    The two vectors of a product have a cosine of one half, so that shrinkage shows as a bias of the product.
    """
    mse = product = bias = 0.0
    for seed in range(seeds):
        codec = _codec(options, dim, seed)
        x, other = unit_vectors(vectors, dim, 2 * seed), unit_vectors(vectors, dim, 2 * seed + 1)
        across = other - (other * x).sum(-1, keepdim=True) * x
        y = x / 2 + math.sqrt(3) / 2 * across / across.norm(dim=-1, keepdim=True)
        error = codec.decode(codec.encode(x)) - x
        products = (error * y).sum(-1)
        mse += error.square().sum(-1).mean().item() / seeds
        product += products.square().mean().item() * dim / seeds
        bias += products.mean().item() / seeds
    return mse, product, bias


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


def measure_embeddings(
    base: torch.Tensor,
    queries: torch.Tensor,
    bits: Sequence[int],
    *,
    seeds: int = 4,
    on_progress: Callable[[int, int, str], None] | None = None,
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
        raise ValueError(f"bits={list(bits)}: allowed whole numbers from 1 to 6, at least one")
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: allowed at least 1")
    products = queries @ base.T
    ranges = _equal_ranges(products)
    todo = [(name, number) for number in dict.fromkeys(bits) for name in ESTIMATORS]
    rows = []
    for done, (name, number) in enumerate(todo):
        if on_progress is not None:
            on_progress(done, len(todo), f"{name}, {number} bits")
        codecs = [_codec(estimator_options(name, number), base.shape[1], seed) for seed in range(seeds)]
        errors = [codec.decode(codec.encode(base[None, None]))[0, 0] - base for codec in codecs]
        mse = sum(error.square().sum(1).mean().item() for error in errors) / seeds
        of_products = torch.stack([queries @ error.T for error in errors])
        density, edges = torch.histogram(of_products.flatten(), ERROR_BINS, density=True)
        rows.append(
            Distortion(
                estimator=name,
                bits=number,
                stored_bits=codecs[0].bits_per_number(),
                mse=mse,
                product_error=of_products.double().square().mean().item() * base.shape[1],
                bias=of_products.double().mean().item(),
                least=edges[0].item(),
                greatest=edges[-1].item(),
                density=[float(f"{height:.4g}") for height in density.tolist()],
                by_product=list(_by_product(products, ranges, of_products)),
            )
        )
    if on_progress is not None:
        on_progress(len(todo), len(todo), "distortion")
    return rows


def _equal_ranges(products: torch.Tensor) -> torch.Tensor:
    """Index of each product's range among `PRODUCT_BINS` ranges of equally many pairs; shaped like `products`."""
    order = products.flatten().sort().values
    inner = torch.arange(1, PRODUCT_BINS) * order.numel() // PRODUCT_BINS
    return torch.bucketize(products, order[inner], right=True)


def _by_product(products: torch.Tensor, ranges: torch.Tensor, errors: torch.Tensor) -> Iterator[ProductBin]:
    for index in range(PRODUCT_BINS):
        chosen = ranges == index
        pairs = int(chosen.sum())
        if pairs:
            of_range = errors[:, chosen].double()
            spread = of_range.std(correction=0).item()
            yield ProductBin(products[chosen].double().mean().item(), of_range.mean().item(), spread, pairs)
