"""Observe the queries and keys of a model's attention, and compute attention weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINKS, RECENT = 16, 64
"""First and last tokens of a calibration window that count as sinks and as recent."""
Observer = Callable[[int, torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Called with the layer's index, queries `[B, Hq, T, D]`, keys `[B, H, T, D]` and the call's options."""


@contextmanager
def observed_attention(model: PreTrainedModel, observer: Observer) -> Iterator[bool]:
    """Call `observer` before each attention call within the block; yields True if the model's calls can be observed.

    They cannot if Transformers does not look the attention function up by name. Eager attention, which is in the
    model's own file, counts as looked up.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = str(model.config.get_text_config(decoder=True)._attn_implementation)
    named = ALL_ATTENTION_FUNCTIONS.get(name)
    if named is None and not (name == "eager" and model._can_set_attn_implementation()):
        yield False
        return

    def observe(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        observer(int(module.layer_idx), query, key, options)  # type: ignore[arg-type]
        attend = named or sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, *args, **options)

    before = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = observe
    try:
        yield True
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if before is not None:
            ALL_ATTENTION_FUNCTIONS[name] = before


def attention_paid(
    query: torch.Tensor,
    keys: torch.Tensor,
    at: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    sinks: int = SINKS,
    recent: int = RECENT,
) -> torch.Tensor:
    """Softmax weights `[H, R, T]` of queries `[H, R, D]` at positions `at` `[R]` over keys `[H, T, D]`.

    The first `sinks` keys and the last `recent` before each query get zero, because they are not encoded. `s_aux` is
    `[H, R]`; `mask` is `[H or 1, R, T]`, and None hides only the future. All else is as in `AttentionCall`.
    """
    place = torch.arange(keys.shape[1], device=keys.device)
    scores = (query.float() * scaling) @ keys.float().mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        scores = scores if mask.dtype == torch.bool else scores + mask.float()
        scores = scores.masked_fill(hidden, -torch.inf)
    scores.masked_fill_(place > at[:, None], -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float()[..., None]], -1)
    p = scores.softmax(-1)[..., : keys.shape[1]].masked_fill_((place < sinks) | (at[:, None] - place < recent), 0.0)
    return p if mask is None else p.nan_to_num_()  # queries of padding see no token
