"""Caches given to models: the name of the argument, which Transformers 5.24 changed, and feeding in steps."""

from typing import Any

import torch
from transformers.cache_utils import Cache

from kvcache_compress.modeling.decoder import cache_argument


def with_cache(cache: Any) -> dict[str, Any]:
    """Argument of a model, or of its `generate`, for a cache, by the name that this version of Transformers prefers."""
    return {cache_argument(): cache}


def feed(
    model: Any, cache: Cache, ids: torch.Tensor, sizes: list[int] | None = None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits `[B, T, vocab]` of `ids` `[B, T]`, given to the model in steps of `sizes` tokens.

    `mask` `[B, past + T]` marks tokens that are not padding.
    """
    logits = []
    for part in ids.split(sizes or [ids.shape[1]], dim=1):
        past = int(cache.get_seq_length())
        extra = {}
        if mask is not None:
            seen = mask[:, : past + part.shape[1]]
            extra = {"attention_mask": seen, "position_ids": (seen.cumsum(-1) - 1).clamp_min(0)[:, past:]}
        logits.append(model(input_ids=part, **with_cache(cache), use_cache=True, **extra).logits)
    return torch.cat(logits, 1)
