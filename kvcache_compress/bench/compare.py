"""Compare attention, before it is timed, with plain attention over decoded keys and values of the same shape.

Only two sequences of the batch are compared, which keeps it fast at long contexts: the last one, whose codes lie
farthest in memory, and a random one. The others must at least be finite.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from kvcache_compress.storage.view import View

ATTENTION_BAR = 2e-3
"""Largest RMS of the difference relative to the RMS of the output, in addition to rounding of the output."""
LIBRARY_BAR = 1e-2
"""The same bound for PyTorch's attention, which rounds weights to bfloat16."""


def compare(
    attend: Callable[[], torch.Tensor],
    query: torch.Tensor,
    read: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    bar: float,
) -> float:
    """Relative error of `attend()`, `[B, Hq, D]`, for queries `[B, Hq, D]`: the worse of two calls.

    The second call is a repeated launch, as timed ones are.

    Args:
        read: returns keys and values `[n, H, T, D]` of n rows of the batch, in float32.
        bar: largest error in addition to rounding of the output.

    Raises:
        ValueError: the error is larger than allowed, or any number is not finite.
    """
    batch = len(query)
    rows = sorted({int(torch.randint(batch, ())), batch - 1})
    expected = plain_attention(query[rows].float(), *read(rows))
    allowed = math.hypot(bar, relative_error(expected.to(query.dtype), expected))
    worst = 0.0
    for _ in range(2):
        ours = attend()
        error = relative_error(ours[rows], expected) if bool(ours.isfinite().all()) else math.nan
        if not error <= allowed:  # or NaN
            raise ValueError(f"attention differs by {error:.1e} of its size, more than {allowed:.1e}")
        worst = max(worst, error)
    return worst


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of queries `[B, Hq, D]` over keys and values `[B, H, T, D]`, in plain torch: `[B, Hq, Dv]`."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    return ((grouped @ keys.mT * query.shape[-1] ** -0.5).softmax(-1) @ values).flatten(1, 2)


def decoded(side: View, rows: list[int]) -> torch.Tensor:
    """Decode the given batch rows of a side to float32."""
    store, track = copy.copy(side.store), copy.copy(side.track)
    store.buffers = tuple(buffer[rows] for buffer in store.buffers)
    if track is not None:
        track.buffer = track.buffer[rows]
    sinks, tail = side.sinks[rows].float(), side.tail[rows].float()
    return replace(side, sinks=sinks, tail_buffer=tail, store=store, track=track).stored()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """RMS of the difference relative to the RMS of `theirs`."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
