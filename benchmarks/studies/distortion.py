"""Measure TurboQuant's distortion on random unit vectors, to compare with the paper's bounds (Theorems 1 to 3).

python benchmarks/studies/distortion.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions

RESULT = Path(__file__).resolve().parents[1] / "results" / "distortion.json"
ESTIMATORS: dict[str, dict[str, Any]] = {
    "mse, norm (paper)": {"codebook": "lloyd_max", "scalar": "norm"},
    "mse, unbiased": {"codebook": "lloyd_max", "scalar": "unbiased"},
    "prod, Gaussian S (paper)": {"estimator": "prod", "sketch": "gaussian"},
    "prod, orthogonal S": {"estimator": "prod"},
}
"""Options of each estimator besides its bits and a uniformly random rotation."""
CPU = torch.device("cpu")


def unit_vectors(count: int, dim: int, seed: int) -> torch.Tensor:
    """Random unit vectors, float32 `[1, 1, count, dim]`."""
    x = torch.randn(1, 1, count, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def measure_random(
    estimator: str, bits: int, dim: int = 128, vectors: int = 1024, seeds: int = 4
) -> tuple[float, float, float]:
    """Mean squared error of a vector, `dim` times that of its inner product with another, and the product's bias.

    The two vectors of a product have a cosine of one half, so that shrinkage shows as a bias of the product.
    """
    mse = product = bias = 0.0
    for seed in range(seeds):
        options = TurboQuantOptions(bits=bits, **ESTIMATORS[estimator])
        codec = TurboQuantCodec(options, CodecContext("values", dim, 1, 0, seed, 0, torch.float32, CPU))
        x, other = unit_vectors(vectors, dim, 2 * seed), unit_vectors(vectors, dim, 2 * seed + 1)
        across = other - (other * x).sum(-1, keepdim=True) * x
        y = x / 2 + math.sqrt(3) / 2 * across / across.norm(dim=-1, keepdim=True)
        error = codec.decode(codec.encode(x)) - x
        products = (error * y).sum(-1)
        mse += error.square().sum(-1).mean().item() / seeds
        product += products.square().mean().item() * dim / seeds
        bias += products.mean().item() / seeds
    return mse, product, bias


def main(output: Path = RESULT) -> None:
    names = "mse", "product_error", "product_bias"
    rows = [
        {"estimator": name, "bits": bits} | dict(zip(names, measure_random(name, bits), strict=True))
        for name in ESTIMATORS
        for bits in (1, 2, 3, 4)
    ]
    write_json(output, {"dim": 128, "rows": rows}, CPU)


if __name__ == "__main__":
    typer.run(main)
