"""Choice of the path by which a step attends to a compressed layer.

`triton`, `cpp`, `torch`: fused attention of a backend, over the codes as they are stored. `tiled`: attention of many
queries over tiles of decoded tokens. `decode`: the model's previous attention over the whole layer, decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from transformers.utils.output_capturing import _active_collector

from kvcache_compress.codecs.backend import load_part
from kvcache_compress.codecs.base import Backend
from kvcache_compress.codecs.mask import AttentionCall, Mask
from kvcache_compress.storage.segments import SideSegments
from kvcache_compress.storage.side import MAX_DECODE_TOKENS

if TYPE_CHECKING:
    from .compile_ops import TracedStep
    from .handle import Step

logger = logging.getLogger(__name__)
AttentionPath: TypeAlias = Backend | Literal["tiled", "decode"]
MAX_CPP_QUERIES = 128
"""Most queries of a chunk for C++; with more, PyTorch's attention over decoded tiles is faster."""
_MODULES: dict[AttentionPath, str] = {
    "triton": "triton_kernels.attention.launch",
    "cpp": "cpu_kernels.attention.launch",
    "torch": "attention.reference",
    "tiled": "attention.tiled",
}
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
    """The path of one attention call, and its number of queries."""

    path: AttentionPath
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


def record(path: AttentionPath, queries: int) -> None:
    """Note a call for the open `record_paths` blocks."""
    for taken in _RECORDS:
        taken.append(PathTaken(path, queries))


def attention(path: AttentionPath) -> Callable[[AttentionCall, SideSegments, SideSegments], torch.Tensor]:
    """Return the function `attend` of a path, with the arguments and the result of `reference.attend`."""
    found: Callable[..., torch.Tensor] = load_part(_MODULES[path]).attend
    return found


def path_over(step: Step, call: AttentionCall) -> AttentionPath:
    """Choose the path by which a call's queries attend to a layer's tokens.

    Without packed tokens a few queries take torch, since codecs may not have their statistics yet, and a chunk takes
    the model's own attention. With packed tokens a decode step takes the layer's backend, and so does a chunk of up to
    `MAX_CPP_QUERIES` float32 queries on a CPU; a longer one goes tile by tile if that saves decoding a long layer.
    """
    keys, query = step.keys, call.query
    count = query.shape[2]
    if not keys.packed:
        return "torch" if count <= MAX_DECODE_TOKENS else "decode"
    if count <= MAX_DECODE_TOKENS:
        return step.backend
    cpp = step.backend == "cpp"
    if cpp and count <= MAX_CPP_QUERIES and query.dtype == torch.float32 and step.values.codec.chunks_on_cpp:
        return "cpp"
    tiled = load_part("attention.tiled")
    long = cpp or keys.packed > tiled.TILE_TOKENS
    return "tiled" if long and tiled.supports(call, keys, step.values) else "decode"


def attention_path(
    step: Step | TracedStep,
    call: AttentionCall,
    module: torch.nn.Module,
    mask: Any,
    dropout: float,
    options: Mapping[str, Any],
) -> AttentionPath:
    """Choose the path of a call by Transformers, with its mask: `decode` if no other path computes what is asked for.

    The others need: no gradients of queries, masks or `s_aux`, no dropout, no mask or one that is a tensor, causal
    attention, no attention weights, and no unknown option that could change attention.
    """
    inputs = call.query, mask, call.s_aux
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        return "decode"
    if weights_wanted() or options.get("output_attentions"):
        return "decode"
    unknown = _unsupported(call, module, mask, dropout, options)
    if unknown is None:
        return step.path(call)
    if step.packed or torch.compiler.is_compiling():
        _warn_of_decoding(unknown)
    return "decode"


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
