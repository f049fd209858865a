"""Scalar quantization of unit vectors with a codebook, and the one number stored per vector."""

from __future__ import annotations

from typing import Literal

import torch

from . import packing
from .backend import quantizer
from .base import Backend, Fields
from .lloyd_max import boundaries

Scalar = Literal["norm", "match", "unbiased", "least_squares"]
SCALE_MAX = torch.finfo(torch.float16).max


def quantize_on(
    backend: Backend, z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar
) -> Fields:
    """Quantize with the backend's own implementation of `quantize`, if it has one."""
    return quantizer(backend, quantize, "turboquant", "quantize_levels")(z, norm, levels, bits, scalar)


def quantize(z: torch.Tensor, norm: torch.Tensor, levels: torch.Tensor, bits: int, scalar: Scalar) -> Fields:
    """Pack the nearest levels of unit vectors `z` `[..., width]`, and store one scalar per vector in 16 bits.

    `levels` `[2 ** bits]` are in the order of their codes: ascending, or reordered by `lloyd_max.outward`.
    The scalar of a vector x = norm · z with code point ẑ is: `norm`; `match`, norm / ‖ẑ‖; `unbiased`,
    norm ⟨z, z⟩ / ⟨z, ẑ⟩; `least_squares`, norm ⟨z, ẑ⟩ / ⟨ẑ, ẑ⟩.
    """
    codes = levels.argsort()[torch.bucketize(z.contiguous(), boundaries(levels))]
    return (*packing.pack(codes, bits), stored_scalar(z, levels[codes], norm, scalar))


def stored_scalar(z: torch.Tensor, point: torch.Tensor, norm: torch.Tensor, scalar: Scalar) -> torch.Tensor:
    """Stored scalar, float16 `[...]`, of vectors `norm` `[...]` times `z` `[..., width]` with code points `point`."""
    if scalar == "match":
        norm = norm / point.norm(dim=-1)
    elif scalar == "unbiased":
        norm = norm * z.square().sum(-1) / (z * point).sum(-1).clamp_min(1e-12)
    elif scalar == "least_squares":
        norm = norm * (z * point).sum(-1) / point.square().sum(-1)
    return norm.clamp(max=SCALE_MAX).to(torch.float16)
