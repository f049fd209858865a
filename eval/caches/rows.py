"""Several caches of one sequence each as the rows of a batch.

Attention reads each row from its own cache: stacking rows or repeating them per query head would cost more than the
attention itself on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "kvcache_compress_rows"
REPLACED = "sdpa"
"""The only attention implementation that `row_attention` can replace."""


class _Rows(list[torch.Tensor]):
    """Keys or values `[1, H, T, D]` of each row."""


class RowCaches(Cache):
    """Caches of one sequence each and of one length; for use within `row_attention`."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        super().__init__(layers=caches[0].layers)
        self.caches = caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[_Rows, _Rows]:
        rows = zip(self.caches, key_states.split(1), value_states.split(1), strict=True)
        held = [cache.update(keys, values, layer_idx, *args, **kwargs) for cache, keys, values in rows]
        return _Rows(keys for keys, _ in held), _Rows(values for _, values in held)


@contextmanager
def row_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make the model take `RowCaches` instead of a cache, while the context is open."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[REPLACED])
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(REPLACED)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: _Rows,
    value: _Rows,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries `[rows, Hq, n, D]`, row by row; returns `[rows, n, Hq, D]`.

    Query heads that share a key/value head are treated as further queries of it.
    """
    heads, count = key[0].shape[1], query.shape[2]
    groups = query.shape[1] // heads
    grouped = query.unflatten(1, (heads, groups)).flatten(2, 3)
    if attention_mask is None:
        masks: Sequence[torch.Tensor | None] = [None] * len(key)
    else:
        masks = attention_mask.repeat(1, 1, groups, 1).expand(len(key), -1, -1, -1).split(1)
    outputs = [
        torch.nn.functional.scaled_dot_product_attention(rows, keys, values, mask, scale=scaling)
        for rows, keys, values, mask in zip(grouped.split(1), key, value, masks, strict=True)
    ]
    return torch.cat(outputs).unflatten(2, (groups, count)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), None
