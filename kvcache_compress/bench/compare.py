"""Compare attention, before it is timed, with plain attention over decoded keys and values of the same shape.

Only two sequences of the batch are compared, which keeps it fast at long contexts: the last one, whose codes lie
farthest in memory, and a random one. The others must at least be finite.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.view import View

ATTENTION_BAR = 2e-3
"""Largest RMS of the difference relative to the RMS of the output, in addition to rounding of the output."""
LIBRARY_BAR = 1e-2
"""The same bound for PyTorch's attention, which rounds weights to bfloat16."""


class Comparison(NamedTuple):
    """Relative error of attention (None if it returned NaN or infinity), and why its time does not count, or None."""

    error: float | None
    problem: str | None


def compare_views(keys: View, values: View, query: torch.Tensor, scaling: float) -> Comparison:
    """Compare attention of queries `[B, Hq, 1, D]` over a layer."""
    return compare(
        lambda: keys.attend(AttentionCall.of(query, scaling=scaling), values)[:, 0],
        query[:, :, 0],
        lambda rows: (_decoded(keys, rows), _decoded(values, rows)),
        scaling,
    )


def compare(
    attend: Callable[[], torch.Tensor],
    query: torch.Tensor,
    read: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    bar: float = ATTENTION_BAR,
) -> Comparison:
    """Compare `attend()`, `[B, Hq, D]`, for queries `[B, Hq, D]`, with plain attention; the worse of two calls counts.

    The second call is a repeated launch, as timed ones are.

    Args:
        read: returns keys and values `[n, H, T, D]` of n rows of the batch, in float32.
        bar: largest error in addition to rounding of the output.
    """
    batch = len(query)
    rows = sorted({int(torch.randint(batch, ())), batch - 1})
    expected = plain_attention(query[rows].float(), *read(rows), scaling)
    allowed = math.hypot(bar, relative_error(expected.to(query.dtype), expected))
    worst = 0.0
    for _ in range(2):
        ours = attend()
        error = relative_error(ours[rows], expected) if bool(ours.isfinite().all()) else math.nan
        if not error <= allowed:  # or NaN
            problem = f"attention differs by {error:.1e} of its size, more than {allowed:.1e}"
            return Comparison(error if math.isfinite(error) else None, problem)
        worst = max(worst, error)
    return Comparison(worst, None)


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention of queries `[B, Hq, D]` over keys and values `[B, H, T, D]`, in plain torch: `[B, Hq, Dv]`."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).flatten(1, 2)


def _decoded(side: View, rows: list[int]) -> torch.Tensor:
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
