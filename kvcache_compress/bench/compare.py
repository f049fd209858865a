"""Attention that is about to be timed, compared at its own shape with plain attention over decoded keys and values.

Of a few sequences of the batch, so that 32 of 128K tokens take a fraction of a second: the last one, whose codes lie
farthest in memory, and another one by chance. Those that are not compared must at least be finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from kvcache_compress.attention.handle import Step
from kvcache_compress.storage.segments import SideSegments

ATTENTION_BAR = 2e-3
"""RMS of the difference relative to that of the output, beside what rounding the output to 16 bits brings."""
LIBRARY_BAR = 1e-2
"""The same for other libraries' attention, whose weights are bfloat16 numbers: that it is the same attention."""


def compare_view(view: Step, query: torch.Tensor, scaling: float) -> float:
    """What attention of queries `[B, Hq, 1, D]` over a layer differs by; also by a repeated launch, as timed ones are.

    Raises:
        ValueError: more than is allowed.
    """
    return compare(
        lambda: view.attend(query, None, scaling, None, None)[:, 0],
        query[:, :, 0],
        lambda rows: (_decoded(view.keys, rows), _decoded(view.values, rows)),
        scaling,
    )


def compare(
    attend: Callable[[], torch.Tensor],
    query: torch.Tensor,
    read: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    scaling: float,
    bar: float = ATTENTION_BAR,
) -> float:
    """What `attend()`, `[B, Hq, D]`, of queries `[B, Hq, D]` differs by, relative to its size, the worse of two calls.

    Args:
        read: gives keys and values `[n, H, T, D]` in float32 of n rows of the batch.
        bar: what is allowed beside rounding of the output.

    Raises:
        ValueError: more than is allowed.
    """
    batch = len(query)
    rows = sorted({int(torch.randint(batch, ())), batch - 1})
    expected = plain_attention(query[rows].float(), *read(rows), scaling)
    allowed = allowed_error(expected, query.dtype, bar)
    worst = 0.0
    for _ in range(2):
        found = attend()
        error = relative_error(found[rows], expected) if bool(found.isfinite().all()) else math.nan
        if problem := attention_problem(error, allowed):
            raise ValueError(problem)
        worst = max(worst, error)
    return worst


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Of queries `[B, Hq, D]` over `[B, H, T, D]`, `[B, Hq, Dv]`."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).flatten(1, 2)


def _decoded(side: SideSegments, rows: list[int]) -> torch.Tensor:
    """Some rows of a side, decoded in float32."""
    store, track = copy.copy(side.store), copy.copy(side.track)
    store.buffers = [buffer[rows] for buffer in store.buffers]
    if track is not None:
        track.buffer = track.buffer[rows]
    sinks, tail = side.sinks[rows].float(), side.tail[rows].float()
    return replace(side, sinks=sinks, tail_buffer=tail, store=store, track=track).dense()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """RMS of the difference over that of `theirs`."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def allowed_error(expected: torch.Tensor, dtype: torch.dtype, bar: float = ATTENTION_BAR) -> float:
    """Of attention in `dtype` whose result should be `expected`."""
    return math.hypot(bar, relative_error(expected.to(dtype), expected))


def attention_problem(error: float, allowed: float) -> str | None:
    """Why attention with this error may not be timed."""
    if error <= allowed:  # NaN is no number to be at most anything
        return None
    return f"attention differs by {error:.1e} of its size: allowed {allowed:.1e}"
