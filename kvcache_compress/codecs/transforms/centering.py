"""Centring of keys, for methods that code directions: codes hold `k - μ`, and `q·μ` is added to the scores."""

from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BeforeValidator

from ..base import CodecContext, Side


def switch_from_yaml(center: Any) -> Any:
    """Turn booleans back into `on` and `off`, which YAML 1.1 reads as booleans if unquoted."""
    return {True: "on", False: "off"}.get(center, center) if isinstance(center, bool) else center


Center: TypeAlias = Annotated[Literal["auto", "on", "off"], BeforeValidator(switch_from_yaml)]
"""`on` subtracts the mean key of the first prefill, `off` never does, and `auto` does so in heads where it is large."""
CENTER_SHARE = 0.1
"""Least share of the mean in the mean squared key norm at which `center: auto` subtracts it."""


def chosen_center(center: Center | None, context: CodecContext) -> Center:
    """Resolve the option: keys default to `auto`, which is `off` without dense sinks, as sinks distort the mean."""
    center = center or ("auto" if context.side == "keys" else "off")
    return "off" if center == "auto" and context.sink_tokens == 0 else center


def mean_key(x: torch.Tensor, center: str) -> torch.Tensor | None:
    """Mean of keys `[B, H, T, D]`, float32 `[H, D]`; None for `off`, zero in heads where it is small for `auto`."""
    if center == "off":
        return None
    x = x.float()
    mean = x.mean(dim=(0, 2))
    return large_mean(mean, x.square().sum(-1).mean(dim=(0, 2))) if center == "auto" else mean


def large_mean(mean: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """Zero the mean `[H, D]` in heads where it is small relative to `energy` `[H]`, the mean squared key norm."""
    share = mean.square().sum(-1) / energy.clamp_min(1e-30)
    return torch.where(share[:, None] > CENTER_SHARE, mean, 0.0)


def check_for_keys(method: str, side: Side, **options: str | None) -> None:
    """Raise `ValueError` for centred or equalized values; only keys can be."""
    for name, value in options.items():
        if side == "values" and value not in (None, "off"):
            raise ValueError(f"{name}={value!r} for values of {method} must be 'off': it is for keys alone")
