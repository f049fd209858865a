"""Sign sketches of residuals and keys (QJL, Definition 3.1; the second stage of TurboQuant's Algorithm 2)."""

import math
from typing import Literal

import torch

from ..device import on_cpu
from ..transforms.rotation import haar

SketchKind = Literal["orthogonal", "gaussian"]


def sketch_constant(kind: SketchKind, dim: int, rows: int | None = None) -> float:
    """Factor that makes `⟨S y, sign(S r)⟩ ‖r‖` an unbiased estimate of ⟨y, r⟩; S is `rows` x `dim`, default square.

    Gaussian S: √(π/2) / rows (QJL, Lemma 3.2). Rows of √d · Haar: 1 / (rows √d E|u₁|) with E|u₁| = Γ(d/2) / (√π
    Γ((d+1)/2)), also if the last block of rows is incomplete.
    """
    rows = rows or dim
    if kind == "gaussian":
        return math.sqrt(math.pi / 2) / rows
    mean = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    return 1 / (rows * math.sqrt(dim) * mean)


@on_cpu()
def sketch_matrix(kind: SketchKind, dim: int, seed: int, rows: int | None = None) -> torch.Tensor:
    """Sketch S, float32 `[rows, dim]` (default square): Gaussian, or the first rows of stacked √d · Haar rotations."""
    rows = rows or dim
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(rows, dim, generator=generator)
    blocks = [haar(dim, generator) for _ in range(-(-rows // dim))]
    return torch.cat(blocks)[:rows].float() * math.sqrt(dim)
