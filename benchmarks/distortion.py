"""TurboQuant's distortion on random unit vectors against its paper's figures and bounds (Theorems 1 to 3).

python benchmarks/distortion.py --output benchmarks/results/distortion.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from kvcache_compress.codec import CodecContext
from kvcache_compress.eval.results import command_line, package_versions, write_atomically
from kvcache_compress.methods.turboquant import TurboQuantCodec, TurboQuantOptions

PAPER_MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PAPER_PRODUCT_ERROR = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}


def unit_vectors(count: int, dim: int, seed: int) -> torch.Tensor:
    """Random unit vectors, float32 `[1, 1, count, dim]`."""
    x = torch.randn(1, 1, count, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


def measure(options: TurboQuantOptions, dim: int, vectors: int, seeds: int) -> tuple[float, float, float]:
    """Mean squared error of a unit vector, that of its inner product with another times `dim`, and its mean error.

    The two vectors of a product have a cosine of one half, so that shrinkage shows as a bias of the product.
    """
    mse = product = bias = 0.0
    for seed in range(seeds):
        context = CodecContext("values", dim, 1, 0, seed, 0, torch.float32, torch.device("cpu"))
        codec = TurboQuantCodec(options, context)
        x, other = unit_vectors(vectors, dim, 2 * seed), unit_vectors(vectors, dim, 2 * seed + 1)
        across = other - (other * x).sum(-1, keepdim=True) * x
        y = x / 2 + math.sqrt(3) / 2 * across / across.norm(dim=-1, keepdim=True)
        error = codec.decode(codec.encode(x)) - x
        products = (error * y).sum(-1)
        mse += error.square().sum(-1).mean().item() / seeds
        product += products.square().mean().item() * dim / seeds
        bias += products.mean().item() / seeds
    return mse, product, bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--vectors", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    estimators = {
        "mse, norm (paper)": {"scalar": "norm"},
        "mse, unbiased (ours)": {"scalar": "unbiased"},
        "prod, Gaussian S (paper)": {"estimator": "prod", "sketch": "gaussian"},
        "prod, orthogonal S": {"estimator": "prod"},
    }
    rows = []
    for name, given in estimators.items():
        for bits in PAPER_MSE:
            options = TurboQuantOptions(bits=bits, rotation="haar", **given)
            mse, product, bias = measure(options, arguments.dim, arguments.vectors, arguments.seeds)
            rows.append({"estimator": name, "bits": bits, "mse": mse, "product_error": product, "product_bias": bias})
    result = {"command": command_line(), "dim": arguments.dim, "versions": package_versions(), "rows": rows}
    write_atomically(arguments.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
