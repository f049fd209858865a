"""Make a layer's empty storage: its codecs, back end and windows."""

from __future__ import annotations

import math

import torch

from kvcache_compress.backends.choice import resolve_backend
from kvcache_compress.codecs.base import CodecContext, Side
from kvcache_compress.config import CompressionConfig, LayerPlan
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.bit_budget import BitBudget
from kvcache_compress.storage.checks import PackableChecks
from kvcache_compress.storage.dynamic import DynamicStorage
from kvcache_compress.storage.shared.padding import PaddingRecord
from kvcache_compress.storage.shared.rope_track import RopeTrack
from kvcache_compress.storage.side import SideState, Windows

FLUSH_TOKENS = 32
"""Tokens that leave the recent window together, which spreads the cost of encoding over as many steps."""


def new_storage(
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: LayerPlan,
    compression: CompressionConfig,
    rope: RopeLayout | None,
    track: RopeTrack | None,
    padding: PaddingRecord,
    checks: PackableChecks,
    budget: BitBudget | None = None,
) -> DynamicStorage:
    """Build codecs and an empty storage for keys and values like these, `[B, H, T, D]`."""
    inputs: dict[Side, torch.Tensor] = {"keys": keys, "values": values}
    codecs = {}
    for side, x in inputs.items():
        context = CodecContext(
            side=side, head_dim=x.shape[-1], heads=x.shape[1], layer=checks.layer, seed=compression.seed,
            sink_tokens=plan.sink_tokens, dtype=x.dtype, device=x.device, rope=rope,
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
            track if plan.rope_use(side) == "factors" else None, padding,
        )
        for side, codec in codecs.items()
    }  # fmt: skip
    return DynamicStorage(
        sides, windows, checks, backend, flushes_steps=compression.quantize_generated, track=track,
        leads_track=track is None or track.leader == checks.layer,
        budget=budget,
    )  # fmt: skip
