"""Choice of the path by which a step attends to a compressed layer.

A back end: fused attention over the codes as they are stored. `TILED`: attention of many queries over tiles of decoded
tokens. None: the model's previous attention over the whole layer, decoded (`decode` in records).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from transformers.utils.output_capturing import _active_collector

from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.storage.backend import Backend
from kvcache_compress.storage.side import MAX_DECODE_TOKENS

from . import tiled

if TYPE_CHECKING:
    from .compile_ops import TracedStep
    from .handle import Step

logger = logging.getLogger(__name__)
DECODE = "decode"
"""Name of the path None in records."""


class Tiled:
    """The path over tiles of decoded tokens."""

    name = "tiled"
    takes_token_masks, takes_padding_masks = False, True
    attend = staticmethod(tiled.attend)


TILED = Tiled()
AttentionPath: TypeAlias = Backend | Tiled
_KNOWN = {"softcap", "s_aux", "is_causal", "output_attentions"}
"""Options of attention functions that `attention_path` or the fused paths read."""
_IDLE = {"position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "output_router_logits"}
_IDLE |= {"num_items_in_batch", "seq_idx", "max_length_q", "max_length_k", "logits_to_keep", "return_shared_kv_states"}
"""Options that do not change attention: other parts of a model read them, or flash attention with `cu_seq_lens_*`."""
_IN_MASK = {"sliding_window", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Options that only flash attention reads; eager attention and SDPA get the same from the mask."""
_WARNED: set[str] = set()
"""Arguments that a warning has named."""


class PathTaken(NamedTuple):
    """Name of the path of one attention call, and its number of queries."""

    path: str
    queries: int


_RECORDS: list[list[PathTaken]] = []


@contextmanager
def record_paths() -> Iterator[list[PathTaken]]:
    """Record the path of every attention call over a compressed layer, in order, while the block runs.

    Calls of a first prompt, which nothing compressed takes part in, are not recorded.

        with record_paths() as taken:
            model.generate(**inputs, past_key_values=cache)
        print(Counter(taken))
    """
    taken: list[PathTaken] = []
    _RECORDS.append(taken)
    try:
        yield taken
    finally:
        _RECORDS[:] = [records for records in _RECORDS if records is not taken]


def record(path: str, queries: int) -> None:
    """Note a call for the open `record_paths` blocks."""
    for taken in _RECORDS:
        taken.append(PathTaken(path, queries))


def path_over(step: Step, call: AttentionCall) -> AttentionPath | None:
    """Choose the path by which a call's queries attend to a layer's tokens.

    The layer's back end handles decode steps, and chunks that it computes fast (`takes`). A longer chunk goes tile by
    tile if that saves decoding a long layer. Without packed tokens a chunk takes the model's own attention.
    """
    keys, values, backend = step.keys, step.values, step.backend
    if backend.takes(call, keys, values) and (keys.packed or call.query.shape[2] <= MAX_DECODE_TOKENS):
        return backend
    long = keys.packed > (0 if backend.always_tiles else tiled.TILE_TOKENS)
    return TILED if long and tiled.supports(call, keys, values) else None


def attention_path(
    step: Step | TracedStep,
    call: AttentionCall,
    module: torch.nn.Module,
    mask: Any,
    dropout: float,
    options: Mapping[str, Any],
) -> AttentionPath | None:
    """Choose the path of a call by Transformers, with its mask: None if no other path computes what is asked for.

    The others need: no gradients of queries, masks or `s_aux`, no dropout, no mask or one that is a tensor, causal
    attention, no attention weights, and no unknown option that could change attention.
    """
    inputs = call.query, mask, call.s_aux
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        return None
    if weights_wanted() or options.get("output_attentions"):
        return None
    unknown = _unsupported(call, module, mask, dropout, options)
    if unknown is None:
        return step.path(call)
    if step.packed or torch.compiler.is_compiling():
        _warn_of_decoding(unknown)
    return None


def _unsupported(
    call: AttentionCall, module: torch.nn.Module, mask: Any, dropout: float, options: Mapping[str, Any]
) -> str | None:
    """Return the argument of a call that fused attention does not support, in words for a warning, or None."""
    if dropout:
        return "dropout, which model.eval() switches off"
    if not Mask.supports(mask):
        return f"masks of type {type(mask).__name__}"
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # A mask over queries and tokens replaces causality, and a single query sees all tokens either way.
    if not causal and call.query.shape[2] > 1 and not call.mask.is_by_query:
        return "is_causal=False for several tokens without a mask"
    for name, value in options.items():
        if value is None or value is False or name in _KNOWN or name in _IDLE:
            continue
        config: Any = module.config
        if name not in _IN_MASK or getattr(config._attn_implementation, "previous", "sdpa") not in ("sdpa", "eager"):
            return f"the option {name}"
    return None


@torch.compiler.assume_constant_result
def _warn_of_decoding(unknown: str) -> None:
    """Warn once about an argument, also while a model is being compiled."""
    if unknown not in _WARNED:
        _WARNED.add(unknown)
        logger.warning(
            "fused attention does not support %s: steps with it decode all packed tokens, which is slower. Leave it "
            "out if you pass it yourself",
            unknown,
        )


def weights_wanted() -> bool:
    """Return True if this forward is to return attention weights, which several families do not pass on as an option.

    GPT-2 is one. If only layers are compiled, this cannot be known, and those families return no weights.
    """
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())
