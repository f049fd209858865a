"""Centring of keys, which serves every method that stores directions: codes hold `k - μ`, scores get `+ q·μ`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BeforeValidator

from .base import CodecContext, Side


def _from_yaml(center: Any) -> Any:
    """YAML 1.1 reads bare `on` and `off` as booleans."""
    return {True: "on", False: "off"}.get(center, center) if isinstance(center, bool) else center


Center: TypeAlias = Annotated[Literal["auto", "on", "off"], BeforeValidator(_from_yaml)]
"""Whether the mean key of the first prefill is subtracted; `auto`: where it is large."""
CENTER_SHARE = 0.1
"""`center: auto` subtracts the mean where it holds more than this share of the mean squared norm of the keys."""


def chosen_center(center: Center | None, context: CodecContext) -> Center:
    """What a codec does: by default keys are centred as by `auto`, which needs the sinks out of the mean."""
    center = center or ("auto" if context.side == "keys" else "off")
    return "off" if center == "auto" and context.sink_tokens == 0 else center


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


def centred(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Tokens `[B, H, T, D]` less their mean `[H, D]`, where there is one; float32."""
    return x.float() if mean is None else x.float() - mean[:, None]


def check_center(method: str, center: Center | None, side: Side) -> None:
    """Raises `ValueError` for values that are to be centred."""
    if side == "values" and center in ("on", "auto"):
        raise ValueError(f"center={center!r} for values of {method}: allowed 'off' (only keys can be centred)")
