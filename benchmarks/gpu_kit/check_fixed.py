"""Whether steps of a cache of fixed capacity, which have kernels of their own, are right on the device, also when they
are replayed from a CUDA graph.

Two caches take the same prompt and the same steps, one by the kernels and one by PyTorch's operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from transformers import LlamaConfig

from kvcache_compress.attention.handle import PackedKV
from kvcache_compress.attention.interface import AttentionName
from kvcache_compress.bench.compare import allowed_error, attention_problem, relative_error
from kvcache_compress.bench.layers import Shape, named_config, random_codebooks
from kvcache_compress.cache.compressed_cache import CompressedCache
from kvcache_compress.codecs.backend import interpreting

FIXED = ("turboquant-4bit", "kivi-2bit", "polarquant-rope-4bit", "commvq-1bit")
"""Presets whose steps of fixed capacity are checked: more would be compiled for long. The last one encodes apart."""
GRAPHS = FIXED[:3]
"""CommVQ asks the model's embedding in each step, which may copy from the host, unless a model hands positions over."""
BATCH = 2
BEYOND_WINDOWS = 60
"""Tokens of the prompt beside those that stay dense: 32 of them are packed, and 32 more in the fifth step."""
STEPS, FEW_STEPS = 40, 8
"""The latter in Triton's interpreter."""
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class GraphCheck:
    """Steps of a preset for a shape, replayed from a CUDA graph.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        attention_error: the worst of all steps, beside that of PyTorch's operators; None where there is NaN or
            infinity.
        error: what is wrong with them.
    """

    cache: str
    shape: str
    attention_error: float | None = None
    error: str | None = None


def graph_check(preset: str, name: str, shape: Shape, device: torch.device) -> GraphCheck:
    """Decodes by a recorded CUDA graph; without a GPU, by the calls that would be recorded.

    Raises:
        RuntimeError: a step that cannot be recorded.
    """
    recorded = device.type == "cuda" and not interpreting()
    error, problem = check_steps(preset, shape, device, torch.bfloat16, recorded=recorded)
    return GraphCheck(preset, name, error if math.isfinite(error) else None, problem)


@torch.inference_mode()
def check_steps(
    preset: str, shape: Shape, device: torch.device, dtype: torch.dtype, steps: int = 0, recorded: bool = False
) -> tuple[float, str | None]:
    """What attention after each step differs by, the worst, and what is wrong with it.

    `steps`: of them, by default as many as are usual. `recorded`: all but the first are replayed from a CUDA graph.
    """
    steps = steps or (FEW_STEPS if interpreting() else STEPS)
    config = named_config(preset)
    before = config.sink_tokens + config.recent_tokens + BEYOND_WINDOWS
    if config.keys.method == "commvq":
        bits = config.keys.options().bits  # type: ignore[attr-defined]
        config = config.with_codebooks(random_codebooks(shape.head_dim, shape.kv_heads, bits, encoder=False))
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

    def step(cache: CompressedCache, query: torch.Tensor) -> torch.Tensor:
        step = cast(PackedKV, cache.update(keys, values, 0)[0]).step
        return step.attend(query, None, shape.head_dim**-0.5, None, None)

    run: Callable[[], torch.Tensor] = partial(step, kernels, query)
    worst = 0.0
    for number in range(1, steps + 1):
        for x in (keys, values, query):
            x.copy_(torch.randn_like(x))
        if recorded and number == WARM_UP_STEPS + 1:
            run = _record(run)
        found, expected = run(), step(operators, query.float())
        error = relative_error(found, expected)
        if problem := attention_problem(error, allowed_error(expected, dtype)):
            return error, f"fixed capacity, step {number}{' (recorded)' if recorded else ''}: {problem}"
        worst = max(worst, error)
    if not packed < kernels.packed_tokens == operators.packed_tokens:
        counts = f"{kernels.packed_tokens} tokens are packed, by operators {operators.packed_tokens}, before {packed}"
        return worst, f"fixed capacity: {counts}"
    return worst, None


def _model(shape: Shape) -> LlamaConfig:
    """Of a model of one layer, with fused attention."""
    sizes = {"num_attention_heads": shape.query_heads, "num_key_value_heads": shape.kv_heads}
    config = LlamaConfig(num_hidden_layers=1, head_dim=shape.head_dim, **sizes)
    config._attn_implementation = AttentionName("sdpa")
    return config


def _record(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
