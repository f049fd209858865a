"""Calling the C++ attention. `attend` is the twin of the one in `reference.py`."""

from __future__ import annotations

import torch

from ..view import SideSegments
from . import build


def attend(
    query: torch.Tensor,
    keys: SideSegments,
    values: SideSegments,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same arguments and result as `reference.attend`.

    Raises:
        RuntimeError: the C++ code cannot be compiled or loaded here.
    """
    k_side, v_side = keys.codec.cpu_side, values.codec.cpu_side
    if mask is not None:
        mask = mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.float()
        mask = mask.expand(*query.shape[:3], keys.shape[2])
    return build.operators().attend.default(
        query if query.stride(3) == 1 else query.contiguous(),
        _fields(keys), k_side.tables, k_side.code, k_side.basis, k_side.mean,
        _fields(values), v_side.tables, v_side.code, v_side.basis,
        keys.sinks, values.sinks, keys.tail, values.tail,
        mask, None if sinks is None else sinks.float().contiguous(), keys.packed, scaling, softcap or 0.0,
    )  # fmt: skip


def _fields(side: SideSegments) -> list[torch.Tensor]:
    """What is stored, and cos and sin of the packed tokens, `[B, H, T, 2 * rotary]`, where the codec asks for them."""
    if side.track is None:
        return side.store.buffers
    _, heads, first, _ = side.sinks.shape
    return [*side.store.buffers, side.track.buffer[:, None, first:].expand(-1, heads, -1, -1)]
