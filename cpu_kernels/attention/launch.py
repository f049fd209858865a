"""Call the C++ attention; `attend` is the twin of `backends.torch.attend`."""

from typing import Any, NamedTuple

import torch

from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.cpu_kernels import build
from kvcache_compress.cpu_kernels.common.operands import FORMS, CPUSide
from kvcache_compress.storage.view import View


class _Described(NamedTuple):
    """Descriptions of one side for the operator, and what they describe, which this object keeps alive.

    A copy of a store describes its own tensors anew.
    """

    eras: list[torch.Tensor]
    """One description per era."""
    starts: list[int]
    parts: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attend(
    call: AttentionCall, keys: View, values: View, rows: torch.Tensor | None = None, page: int = 0
) -> torch.Tensor:
    """Attend in C++; same arguments and result as `backends.torch.attend`, or `Backend.attend_to_pages`."""
    query, mask, s_aux = call.query, call.mask.tensor, call.s_aux
    if mask is not None:
        mask = mask if mask.dtype == torch.bool or mask.is_floating_point() else mask.float()
        mask = mask.expand(*query.shape[:3], keys.tokens)
    described = _described(keys)
    out: torch.Tensor = build.operators().attend.default(
        query if query.stride(3) == 1 else query.contiguous(), described.eras, described.starts,
        _described(values).eras[0], mask, None if s_aux is None else s_aux.float().contiguous(), keys.packed,
        keys.tail_tokens, rows, page, call.scaling, call.softcap or 0.0,
    )  # fmt: skip
    return out.to(query.dtype)


def _described(side: View) -> _Described:
    """Descriptions of a side for the operator, one per era; made again only when a tensor of the side is replaced."""
    store, eras, fields = side.store, side.eras, side.store.buffers
    rope_rows = None if side.track is None else side.track.buffer
    parts = side.sinks, side.tail_buffer, fields, rope_rows, eras
    if store.described is None or any(a is not b for a, b in zip(store.described.parts, parts, strict=True)):
        if rope_rows is not None:
            # Cos and sin of the groups' first tokens, `[B, H, groups, 2 * rotary]`.
            fields = (*fields, rope_rows[:, None].expand(-1, side.sinks.shape[1], -1, -1))
        descriptions = [_description(side, fields, era.codec.cpu_side) for era in eras]
        store.described = _Described(descriptions, [era.start for era in eras], parts)
    return store.described


def _description(side: View, fields: Fields, cpu_side: CPUSide) -> torch.Tensor:
    empty = torch.empty(0, device="cpu")
    code_space = [empty if x is None else x for x in (cpu_side.basis, cpu_side.mean)]
    tensors = [side.sinks, side.tail_buffer, *code_space, *fields, *cpu_side.tables]
    form = FORMS.index(cpu_side.form)
    return build.operators().describe.default(form, cpu_side.options, len(fields), tensors)
