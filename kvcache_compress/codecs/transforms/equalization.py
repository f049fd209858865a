"""Equalization of keys' channels before a rotation mixes them: codes hold `k / e`, and queries become `e q`.

In some models (Qwen2.5) a few key channels are far larger than the others, and their queries as much smaller. A
rotation spreads the large channels' errors over all channels, where they dominate. The error of a score is least for
`e² = RMS(k) / RMS(q)`: the errors of the scaled keys are even, and `e q` multiplies each of them.
"""

import logging
from functools import cache
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import BeforeValidator

from ..base import CodecContext
from .centering import switch_from_yaml

_warn_once = cache(logging.getLogger(__name__).warning)
Equalize: TypeAlias = Annotated[Literal["auto", "off"], BeforeValidator(switch_from_yaml)]
"""`auto` divides outlier channels of keys by a factor before coding; `off` never does."""
OUTLIER = 4.0
"""A channel is an outlier above this multiple of its head's median (of the RMS or the factor)."""
SMALL_OUTLIER = 1 / 8
"""A channel is an outlier below this multiple; small channels are common and cost less."""
OUTLIER_OF_KEYS = 10.0
"""The upper limit if only keys are known, since a large RMS of keys alone may do no harm."""
LARGEST = 256.0
FEWEST = 64
"""Fewest tokens, or queries per head, from which the size of channels is judged."""


def chosen_equalize(equalize: Equalize | None, context: CodecContext) -> bool:
    """Resolve the option: off for values, and off without dense sinks, as sinks distort the keys' moments."""
    return (equalize or "auto") == "auto" and context.side == "keys" and context.sink_tokens > 0


def has_outliers(size: torch.Tensor) -> bool:
    """True if any channel's RMS `size` `[H, D]` is far above or below its head's median."""
    return bool(_is_outlier(_relative(size)).any())


def channel_factors(size: torch.Tensor, count: int, queries: torch.Tensor | None = None) -> torch.Tensor | None:
    """Factors of the channels, float32 `[H, D]`, 1 except for outliers; None if there are none.

    Args:
        size: RMS of the centred keys' channels, `[H, D]`.
        count: number of tokens that `size` was measured on.
        queries: `[B, Hq, n, D]`. Without them, or with few, the factor of a large channel is its relative RMS, which
            helps less.
    """
    heads = len(size)
    if count < FEWEST or not has_outliers(size):
        return None
    if queries is not None and queries.shape[0] * queries.shape[1] * queries.shape[2] >= FEWEST * heads:
        asked = channel_rms(queries.float()).square().unflatten(0, (heads, -1)).mean(1).sqrt()
        relative = _relative((size / asked.clamp_min(1e-30)).sqrt())
        outlier = _is_outlier(relative)
    else:
        relative = _relative(size)
        outlier = relative > OUTLIER_OF_KEYS
        if outlier.any():
            _warn_once(
                "this model's keys have outlier channels, but the queries of the first prompt were not seen (without "
                "fused attention, with gradients, or in compiled code) or are fewer than %d, so the channels' factors "
                "follow from keys alone, which loses more: call enable_fused_attention(model), and run the first "
                "prompt under torch.no_grad(), not compiled",
                FEWEST,
            )
    factors = torch.where(outlier, relative.clamp(1 / LARGEST, LARGEST), 1.0)
    return factors if outlier.any() else None


def channel_rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square of each channel of float32 tokens `[B, H, T, D]`: `[H, D]`."""
    return x.square().mean(dim=(0, 2)).sqrt()


def _relative(x: torch.Tensor) -> torch.Tensor:
    """Divide `[H, D]` by each head's median."""
    return x / x.median(dim=-1, keepdim=True).values


def _is_outlier(relative: torch.Tensor) -> torch.Tensor:
    return (relative > OUTLIER) | (relative < SMALL_OUTLIER)
