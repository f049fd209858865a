"""Call the C++ attention; `attend` is the twin of `backends.torch.attend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.cpu_kernels import build
from kvcache_compress.cpu_kernels.common.operands import CPUSide
from kvcache_compress.storage.view import View


@dataclass(slots=True)
class DescribedSide:
    """Description of one side for the operator: addresses and shapes of its tensors, which this object keeps alive.

    A copy of a store describes its own tensors anew.
    """

    description: torch.Tensor
    sinks: torch.Tensor
    tail: torch.Tensor
    buffers: Fields
    rope_rows: torch.Tensor | None
    cpu_side: CPUSide

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attend(call: AttentionCall, keys: View, values: View) -> torch.Tensor:
    """Attend in C++; same arguments and result as `backends.torch.attend`.

    Raises:
        RuntimeError: the C++ code cannot be compiled or loaded here.
    """
    query, mask, s_aux = call.query, call.mask.tensor, call.s_aux
    if mask is not None:
        mask = mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.float()
        mask = mask.expand(*query.shape[:3], keys.tokens)
    return build.operators().attend.default(
        query if query.stride(3) == 1 else query.contiguous(),
        _described(keys),
        _described(values),
        mask,
        None if s_aux is None else s_aux.float().contiguous(),
        keys.packed,
        keys.tail_tokens,
        call.scaling,
        call.softcap or 0.0,
    )


def _described(side: View) -> torch.Tensor:
    """Description of a side for the operator, made anew only if one of its tensors was replaced."""
    store, cpu_side = side.store, side.codec.cpu_side
    rope_rows = None if side.track is None else side.track.buffer
    known = store.described
    if (
        known is not None
        and known.sinks is side.sinks
        and known.tail is side.tail_buffer
        and known.buffers is store.buffers
        and known.rope_rows is rope_rows
        and known.cpu_side is cpu_side
    ):
        return known.description
    fields = store.buffers
    if rope_rows is not None:
        # Cos and sin of the groups' first tokens, `[B, H, groups, 2 * rotary]`.
        fields = (*fields, rope_rows[:, None].expand(-1, side.sinks.shape[1], -1, -1))
    tensors = [side.sinks, side.tail_buffer, *cpu_side.code_space, *fields, *cpu_side.tables]
    description = build.operators().describe.default(cpu_side.form, cpu_side.options, len(fields), tensors)
    store.described = DescribedSide(description, side.sinks, side.tail_buffer, store.buffers, rope_rows, cpu_side)
    return description
