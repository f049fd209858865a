"""Call the C++ attention; `attend` is the twin of `reference.attend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache_compress.cpu_kernels import build
from kvcache_compress.cpu_kernels.common.operands import Form

if TYPE_CHECKING:
    from kvcache_compress.storage.segments import SideSegments


def attend(
    query: torch.Tensor,
    keys: SideSegments,
    values: SideSegments,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in C++; same arguments and result as `reference.attend`.

    Raises:
        RuntimeError: the C++ code cannot be compiled or loaded here.
    """
    if mask is not None:
        mask = mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.float()
        mask = mask.expand(*query.shape[:3], keys.shape[2])
    return build.operators().attend.default(
        query if query.stride(3) == 1 else query.contiguous(),
        *_operands(keys),
        *_operands(values),
        mask,
        None if s_aux is None else s_aux.float().contiguous(),
        keys.packed,
        scaling,
        softcap or 0.0,
    )


def _operands(side: SideSegments) -> tuple[Form, list[int], list[torch.Tensor]]:
    """Three arguments of the operator for a side: see `Side` in `side.h`."""
    cpu_side, fields = side.codec.cpu_side, _fields(side)
    tensors = [side.sinks, side.tail, *cpu_side.code_space, *fields, *cpu_side.tables]
    return cpu_side.form, [len(fields), *cpu_side.options], tensors


def _fields(side: SideSegments) -> list[torch.Tensor]:
    """Stored fields, and cos and sin of the groups' first tokens, `[B, H, groups, 2 * rotary]`, if it uses them."""
    if side.track is None:
        return side.store.buffers
    heads = side.sinks.shape[1]
    return [*side.store.buffers, side.track.buffer[:, None].expand(-1, heads, -1, -1)]
