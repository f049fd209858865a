"""Make a layer's empty storage: its codecs, back end and windows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.base import CodecContext, Side
from kvcache_compress.storage.checks import PackableChecks
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.side import SideState, Windows

if TYPE_CHECKING:
    from .layer import CompressedLayer

FLUSH_TOKENS = 32
"""Tokens that leave the recent window together, which spreads the cost of encoding over as many steps."""


def new_storage(
    layer: CompressedLayer, keys: torch.Tensor, values: torch.Tensor, checks: PackableChecks
) -> DynamicStorage:
    """Build a layer's codecs and an empty storage for keys and values like these, `[B, H, T, D]`."""
    plan, compression, track = layer.plan, layer.compression, layer.track
    inputs: dict[Side, torch.Tensor] = {"keys": keys, "values": values}
    codecs = {}
    for side, x in inputs.items():
        context = CodecContext(
            side=side, head_dim=x.shape[-1], heads=x.shape[1], layer=layer.index, seed=compression.seed,
            sink_tokens=plan.sink_tokens, dtype=x.dtype, device=x.device, rope=layer.rope,
        )  # fmt: skip
        codecs[side] = plan.side(side).codec()(plan.side(side).options(), context)
    kinds = ((type(codec), codec.options, side) for side, codec in codecs.items())
    backend = resolve_backend(compression.backend, keys.device, kinds)
    group = math.lcm(*(codec.group for codec in codecs.values()))
    flush = math.lcm(FLUSH_TOKENS, group)
    windows = Windows(plan.sink_tokens, plan.recent_tokens, flush, group, compression.max_cache_len)
    sides = {
        side: SideState(
            backend.bind(codec), inputs[side], windows, backend,
            track if plan.rope_use(side) == "factors" else None, layer.padding,
        )
        for side, codec in codecs.items()
    }  # fmt: skip
    return DynamicStorage(
        sides, windows, checks, backend, flushes_steps=compression.quantize_generated, track=track,
        leads_track=track is None or track.leader == layer.index,
    )  # fmt: skip
