"""Sign sketches of residuals and keys (QJL, Definition 3.1; the second stage of TurboQuant's Algorithm 2)."""

from __future__ import annotations

import math
from typing import Literal

import torch

from .rotation import haar

SketchKind = Literal["orthogonal", "gaussian"]


def sketch_constant(kind: SketchKind, dim: int) -> float:
    """Factor that makes `⟨S y, sign(S r)⟩ ‖r‖` unbiased for ⟨y, r⟩, S being `dim` x `dim`.

    Gaussian S: √(π/2) / d (QJL, Lemma 3.2). S = √d · Haar: 1 / (d √d E|u₁|) with E|u₁| = Γ(d/2) / (√π Γ((d+1)/2)).
    """
    if kind == "gaussian":
        return math.sqrt(math.pi / 2) / dim
    mean = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    return 1 / (dim * math.sqrt(dim) * mean)


def sketch_matrix(kind: SketchKind, dim: int, seed: int) -> torch.Tensor:
    """S of the `prod` estimator, float32 `[dim, dim]`: Gaussian, or √d times a Haar rotation."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(dim, dim, generator=generator)
    return haar(dim, generator).float() * math.sqrt(dim)
