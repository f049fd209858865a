"""Consistency of a saved cache's layers: one batch, one length, and the model's heads and dimensions.

A process of a tensor-parallel model holds a run of the heads of every layer, its share. The share's number is saved,
since shapes do not tell the shares apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeInt
from transformers import PreTrainedConfig

from .layer_state import StrictModel


class Share(StrictModel):
    """A process's share of the heads of a tensor-parallel model: number `number` of `of` equal runs."""

    number: NonNegativeInt
    of: int = Field(ge=1, lt=2**16)


WHOLE = Share(number=0, of=1)


def share_held(layers: Sequence[Any], config: PreTrainedConfig) -> Share:
    """This process's share of the model's heads, derived from the first layer whose number of heads the config has."""
    rank, processes = _rank()
    for index, layer in enumerate(layers if processes > 1 else ()):
        for tensor in _rows(layer).values():
            heads, _ = _told(config, index, layer)
            if heads is not None:
                shares, rest = divmod(heads, tensor.shape[1])
                return WHOLE if rest or not shares or processes % shares else Share(number=rank % shares, of=shares)
    return WHOLE


def check_share(share: Share) -> None:
    """Raise `ValueError` if this process holds other heads than this share."""
    rank, processes = _rank()
    if share.number >= share.of:
        raise ValueError(f"damaged: share.number={share.number} of {share.of} shares")
    if processes % share.of or rank % share.of != share.number:
        raise ValueError(
            f"it holds share {share.number} of the model's heads, which tensor parallelism divided into {share.of} "
            f"shares: process {rank} of {processes} cannot load it"
        )


def disagreement(layers: Sequence[Any]) -> str | None:
    """Describe the first two layers that differ in batch or length; None if all agree."""
    found: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(layers):
        for what, size in _sizes(layer):
            first, known = found.setdefault(what, (index, size))
            if size != known:
                return f"{what} of {known} in layer {first}, of {size} in layer {index}"
    return None


def misfit(layers: Sequence[Any], config: PreTrainedConfig, share: Share) -> str | None:
    """Describe the first layer whose heads or dimensions contradict the model's config; None if all agree."""
    for index, layer in enumerate(layers):
        for side, tensor in _rows(layer).items():
            heads, dims = _told(config, index, layer)
            held, dim = tensor.shape[1], tensor.shape[3]
            if heads and held * share.of != heads:
                part = f" in {share.of} shares" if share.of > 1 else ""
                return f"{side} of layer {index} have {held} heads, where the model has {heads}{part}"
            if side in dims and dim != dims[side]:
                return f"{side} of layer {index} have {dim} numbers per head, where the model has {dims[side]}"
    return None


def _rank() -> tuple[int, int]:
    """Rank of this process and number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _rows(layer: Any) -> dict[str, torch.Tensor]:
    """One tensor `[B, H, ?, D]` per side of a layer; empty before its first tokens."""
    held = getattr(layer, "sides", None)
    if held is not None:
        return {side: state.sinks for side, state in held.items()}
    sides = {side: getattr(layer, side, None) for side in ("keys", "values")}
    return {side: x for side, x in sides.items() if isinstance(x, torch.Tensor) and x.ndim == 4}


def _sizes(layer: Any) -> Iterator[tuple[str, int]]:
    """Batch sizes and lengths of a layer's tensors, each with its name for messages."""
    rows = _rows(layer)
    for x in rows.values():
        yield "a batch", x.shape[0]
        yield "a length", int(layer.get_seq_length())
    for name in ("conv_states", "recurrent_states"):
        for state in getattr(layer, name, {}).values():
            if state is not None:
                yield "a batch", state.shape[0]
    indexer = getattr(layer, "indexer_keys", None)
    if rows and indexer is not None:
        yield "a batch", indexer.shape[0]


def _told(config: PreTrainedConfig, index: int, layer: Any) -> tuple[int | None, dict[str, int]]:
    """Heads and dimensions of a layer, as far as the config has them; none for layers that cache latents."""
    others = layer.is_sliding and hasattr(config, "swa_num_key_value_heads")
    if others or getattr(config, "kv_lora_rank", None) is not None:
        return None, {}
    if hasattr(config, "per_layer_config"):
        config = config.per_layer_config[index]
    heads = getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims = {"keys": dim, "values": getattr(config, "v_head_dim", None) or dim}
    return (heads if isinstance(heads, int) else None), {side: x for side, x in dims.items() if isinstance(x, int)}
