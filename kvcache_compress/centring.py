"""Centring of keys, which serves every method that stores directions: codes hold `k - μ`, scores get `+ q·μ`."""

from __future__ import annotations

import torch

CENTER_SHARE = 0.1
"""`center: auto` subtracts the mean where it holds more than this share of the mean squared norm of the keys."""


def mean_key(x: torch.Tensor, center: str) -> torch.Tensor | None:
    """Mean of keys `[B, H, T, D]`, float32 `[H, D]`; for `auto` zero in heads where it is small, None for `off`."""
    if center == "off":
        return None
    x = x.float()
    mean = x.mean(dim=(0, 2))
    if center == "auto":
        share = mean.square().sum(-1) / x.square().sum(-1).mean(dim=(0, 2)).clamp_min(1e-30)
        mean = torch.where(share[:, None] > CENTER_SHARE, mean, 0.0)
    return mean
