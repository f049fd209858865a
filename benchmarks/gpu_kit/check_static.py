"""Check the kernels for steps of static caches on the device, also replayed from a CUDA graph.

Two caches get the same prompt and the same steps, one with the kernels and one with PyTorch's operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from transformers import LlamaConfig

from kvcache_compress.attention.interface import AttentionName
from kvcache_compress.bench.compare import allowed_error, attention_problem, relative_error
from kvcache_compress.bench.layers import Shape, named_config, random_codebooks
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.codecs.base import Fields
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.storage.packed_store import PackedStore
from kvcache_compress.storage.view import View

STATIC = ("turboquant-4bit", "kivi-2bit", "polarquant-rope-4bit", "commvq-1bit")
"""Presets whose steps of static layers are checked: more take long to compile. The last has no kernel encoder."""
GRAPHS = STATIC[:3]
"""Presets replayed from a CUDA graph; CommVQ may copy from the host in a step, unless a model hands over positions."""
BATCH = 2
BEYOND_WINDOWS = 60
"""Tokens of the prompt beyond the dense windows: 32 of them are packed, and 32 more in the fifth step."""
STEPS, FEW_STEPS = 40, 8
"""Steps of a check on a GPU, and in Triton's interpreter."""
WARM_UP_STEPS = 4
CODES_BAR = 1e-3
"""Share of stored words that may differ: if sums round differently, numbers between two levels get the other code."""


@dataclass(frozen=True)
class GraphCheck:
    """Result of checking the steps of a preset and shape, replayed from a CUDA graph.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        attention_error: worst relative error of all steps against PyTorch's operators; None if there is NaN or
            infinity.
        error: description of what is wrong, if anything.
    """

    cache: str
    shape: str
    attention_error: float | None = None
    error: str | None = None


def graph_check(preset: str, name: str, shape: Shape, device: torch.device) -> GraphCheck:
    """Check steps replayed from a CUDA graph; without a GPU, the calls that would be recorded.

    Raises:
        RuntimeError: a step cannot be recorded.
    """
    recorded = device.type == "cuda" and not interpreting()
    error, problem = check_steps(preset, shape, device, torch.bfloat16, recorded=recorded)
    return GraphCheck(preset, name, error if math.isfinite(error) else None, problem)


@torch.inference_mode()
def check_steps(
    preset: str, shape: Shape, device: torch.device, dtype: torch.dtype, steps: int = 0, recorded: bool = False
) -> tuple[float, str | None]:
    """Worst error of attention over all steps, and a description of what is wrong, or None.

    `steps`: number of steps, by default `STEPS`, or `FEW_STEPS` in the interpreter. `recorded`: True to replay all but
    the first `WARM_UP_STEPS` from a CUDA graph.
    """
    steps = steps or (FEW_STEPS if interpreting() else STEPS)
    config = named_config(preset)
    before = config.sink_tokens + config.recent_tokens + BEYOND_WINDOWS
    if config.keys.method == "commvq":
        bits = config.keys.options().bits  # type: ignore[attr-defined]
        config = config.with_files(codebooks=random_codebooks(shape.head_dim, shape.kv_heads, bits, encoder=False))
    kernels, operators = (
        CompressedCache(_model(shape), config.model_copy(update={"backend": backend, "max_cache_len": before + steps}))
        for backend in ("triton", "torch")
    )

    def tokens(heads: int, count: int) -> torch.Tensor:
        return torch.randn(BATCH, heads, count, shape.head_dim, device=device, dtype=dtype)

    prompt = tokens(shape.kv_heads, before), tokens(shape.kv_heads, before)
    for cache in (kernels, operators):
        cache.update(*prompt, 0)
    packed = kernels.packed_tokens
    keys, values, query = tokens(shape.kv_heads, 1), tokens(shape.kv_heads, 1), tokens(shape.query_heads, 1)

    def step() -> torch.Tensor:
        k_view, v_view = (cast(View, x) for x in kernels.update(keys, values, 0))
        stores[:] = k_view.store, v_view.store
        return k_view.attend(AttentionCall.of(query, scaling=shape.head_dim**-0.5), v_view)

    stores: list[PackedStore] = []
    run: Callable[[], torch.Tensor] = step
    worst = 0.0
    for number in range(1, steps + 1):
        for x in (keys, values, query):
            x.copy_(torch.randn_like(x))
        if recorded and number == WARM_UP_STEPS + 1:
            run = record(run)
        ours, views = run(), [cast(View, x) for x in operators.update(keys, values, 0)]
        count, share = operators.packed_tokens, 0.0
        for store, view in zip(stores, views, strict=True):
            share = max(share, differing(store.read(0, count), view.store.read(0, count)))
        # A code at a tie may be the other one, which a heavy token shows in attention: so over the kernels' own codes.
        k_own, v_own = (replace(view, store=store) for view, store in zip(views, stores, strict=True))
        expected = k_own.attend(AttentionCall.of(query.float(), scaling=shape.head_dim**-0.5), v_own)
        error = relative_error(ours, expected)
        problem = attention_problem(error, allowed_error(expected, dtype))
        if problem is None and share > CODES_BAR:
            problem = (
                f"{share:.1e} of the stored words differ, more than {CODES_BAR:g}: compare the encoder with PyTorch's"
            )
        if problem:
            return error, f"static cache, step {number}{' (recorded)' if recorded else ''}: {problem}"
        worst = max(worst, error)
    if not packed < kernels.packed_tokens == operators.packed_tokens:
        counts = f"{kernels.packed_tokens} tokens are packed, by operators {operators.packed_tokens}, before {packed}"
        return worst, f"static cache: {counts}"
    return worst, None


def differing(ours: Fields, theirs: Fields) -> float:
    """Share of words of encoded fields that differ; 16-bit scalars count if by more than a unit in the last place."""
    unequal = total = 0
    for mine, yours in zip(ours, theirs, strict=True):
        if mine.dtype == torch.float16:
            bad = (mine.view(torch.int16).int() - yours.view(torch.int16).int()).abs() > 1
        else:
            bad = mine != yours
        unequal += int(bad.sum())
        total += bad.numel()
    return unequal / total if total else 0.0


def _model(shape: Shape) -> LlamaConfig:
    """Config of a model with one layer and fused attention."""
    sizes = {"num_attention_heads": shape.query_heads, "num_key_value_heads": shape.kv_heads}
    config = LlamaConfig(num_hidden_layers=1, head_dim=shape.head_dim, **sizes)
    config._attn_implementation = AttentionName("sdpa")
    return config


def record(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Record a step as a CUDA graph; the function returned replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
