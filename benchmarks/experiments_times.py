"""Experiments on times: products of queries and packed keys alone, and a long prompt with a long answer.

Run by `benchmarks/experiments.py`, which writes what each function returns to a result file.
All times are of one CPU thread. What is compared takes turns, and ratios are medians over the turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from kvcache_compress.bench.compare import allowed_error, plain_attention, relative_error
from kvcache_compress.bench.layers import encoded_side, middle_layer, named_config
from kvcache_compress.bench.steps import measure_steps
from kvcache_compress.codecs.base import MethodOptions
from kvcache_compress.codecs.mask import AttentionCall
from kvcache_compress.cpu_kernels.attention.launch import attend
from kvcache_compress.eval.caches.resolve import resolve_cache
from kvcache_compress.storage.view import View

HEADS, HEAD_DIM = 8, 128
"""Key heads of Llama-3.1-8B, and the papers' head dimension."""
VALUE_DIM = 16
"""Numbers of a value: few, so that the attention's time is that of the scores."""
KEYS = ("none", "polarquant-rope-4bit", "polarquant-rope-paper-m4n4", "qjl-paper", "qjl-3bit", "polarquant-3.4bit",
        "kivi-2bit", "turboquant-4bit", "turboquant-2bit", "commvq-2bit")  # fmt: skip
ANGLES = 32
"""Angle codes of a pair in the lookup, 5 bits."""

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 1024, "max_position_embeddings": 32_768,
}  # fmt: skip
"""A Llama of an eighth of Llama-3.1-8B's width and heads, and two layers."""
CACHES = ("full", "kivi-2bit", "quanto-4", "polarquant-paper-online", "polarquant-paper-offline", "turboquant-3bit")


def scores(
    tokens: Annotated[list[int], typer.Option(help="Numbers of keys.")] = [1024, 8192, 32_768],  # noqa: B006
    queries: Annotated[list[int], typer.Option(help="Queries of each key head.")] = [1, 4],  # noqa: B006
    turns: int = 40,
) -> dict[str, Any]:
    """Scores of packed keys alone, by kernel and by table lookup, against a dense product (PolarQuant, Table 4)."""
    torch.set_num_threads(1)
    rows = []
    for count in tokens:
        dense = torch.randn(1, HEADS, count, HEAD_DIM)
        values = _side("none", "values", VALUE_DIM, count)
        sides = {preset: _side(preset, "keys", HEAD_DIM, count) for preset in KEYS}
        for each in queries:
            query = torch.randn(1, HEADS * each, 1, HEAD_DIM)
            calls = _torch_calls(query.view(1, HEADS, each, HEAD_DIM), dense)
            for preset, keys in sides.items():
                _check(query, keys, values)
                calls[preset] = partial(attend, AttentionCall.of(query, scaling=1.0), keys, values)
            found = {name: row | {"tokens": count, "queries": each} for name, row in _in_turns(calls, turns).items()}
            for name, row in found.items():
                bits = sides[name].codec.bits_per_number() if name in sides else None
                rows.append({"way": name, "bits": bits} | row)
    return {"heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "turns": turns, "rows": rows}


def _side(preset: str, side: Any, head_dim: int, tokens: int) -> View:
    """Random packed tokens of one side by a preset's method, without dense ones."""
    plan = middle_layer(named_config(preset)).keys
    method, options = ("none", MethodOptions()) if preset == "none" else (plan.method, plan.options())
    sizes = {"heads": HEADS, "packed": tokens, "windows": (0, 0)}
    return encoded_side(method, options, side, head_dim, torch.float32, **sizes, codes="random", backend="cpp")


def _torch_calls(query: torch.Tensor, keys: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Scores in torch of queries `[1, H, n, D]`: products with keys `[1, H, T, D]`, and lookups of as many codes."""
    query16, keys16 = query.bfloat16(), keys.bfloat16()
    shape = HEADS, HEAD_DIM // 2, keys.shape[2]
    codes, radii = torch.randint(ANGLES, shape), torch.rand(shape)
    angles = torch.arange(ANGLES) * 2 * torch.pi / ANGLES
    points = torch.stack([angles.cos(), angles.sin()])
    return {
        "float32": lambda: query @ keys.mT,
        "bfloat16": lambda: query16 @ keys16.mT,
        "lookup": lambda: look_up(query[0], codes, radii, points),
    }


def look_up(query: torch.Tensor, codes: torch.Tensor, radii: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """PolarQuant's table lookup on RoPE pairs, of codes unpacked beforehand: scores `[H, n, T]`.

    Args:
        query: `[H, n, D]`; pair j is channels j and j + D / 2.
        codes, radii: of the keys, `[H, D / 2, T]`.
        points: unit vectors of the codes, `[2, codes]`.
    """
    tables = torch.stack(query.chunk(2, -1), -1) @ points  # [H, n, pairs, codes]
    by_query = [(table.gather(2, codes) * radii).sum(1) for table in tables.unbind(1)]
    return torch.stack(by_query, 1)


def _check(query: torch.Tensor, keys: View, values: View) -> None:
    """Raise ValueError unless the kernel's attention is that over decoded keys and values."""
    expected = plain_attention(query[:, :, 0], keys.dense(), values.dense(), 1.0)
    error = relative_error(attend(AttentionCall.of(query, scaling=1.0), keys, values)[:, 0], expected)
    if not error <= allowed_error(expected, query.dtype):
        raise ValueError(f"keys by {keys.codec.name}: attention differs by {error:.1e} of its size")


def _in_turns(calls: dict[str, Callable[[], torch.Tensor]], turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of this thread's processor time by call, and their ratio to the first call's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begun = time.thread_time()
            call()
            if turn:  # the first warms up
                times[name].append(1e6 * (time.thread_time() - begun))
    first = times[next(iter(calls))]
    return {
        name: {
            "microseconds": round(statistics.median(found), 1),
            "ratio": round(statistics.median(x / y for x, y in zip(found, first, strict=True)), 3),
        }
        for name, found in times.items()
    }


def generation(
    tokens: int = 16_384,
    steps: int = 1024,
    prefills: Annotated[int, typer.Option(help="Prompts per cache; the fastest counts.")] = 1,
) -> dict[str, Any]:
    """Seconds of a prompt of 16,384 tokens and of 1,024 steps after it (recursive PolarQuant, Table 2)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None)).eval()
    ids = torch.randint(SIZES["vocab_size"], (1, tokens))
    found = measure_steps(model, [resolve_cache(name) for name in CACHES], ids, steps, prefills)
    if failed := [f"{row.cache}: {row.error}" for row in found if row.error]:
        raise ValueError("; ".join(failed))
    fields = ("cache", "prefill_seconds", "prefill_ratio", "decode_seconds", "step_ms", "ratio")
    rows = [{name: getattr(row, name) for name in fields} for row in found]
    return {"model": SIZES, "tokens": tokens, "steps": steps, "rows": rows}
