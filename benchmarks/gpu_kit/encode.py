"""Encoding the keys and values of a prompt, one layer's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.bench.layers import Shape, encoded_side, middle_layer, named_config
from kvcache_compress.bench.timing import median_ms
from kvcache_compress.codecs.backend import BackendChoice, interpreting, resolve_backend
from kvcache_compress.storage.side import SideState

FLUSHES = 16
"""Four milliseconds, in which Python queues all launches of a prompt that is encoded in chunks."""


@dataclass(frozen=True)
class EncodeTime:
    """One measurement.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: that are encoded, keys and values.
        milliseconds: median time of one layer.
        gigabytes_per_second: bytes of the uncompressed keys and values over that time.
        error: why there are no figures.
    """

    cache: str
    shape: str
    batch: int
    tokens: int
    milliseconds: float | None = None
    gigabytes_per_second: float | None = None
    error: str | None = None


@torch.inference_mode()
def encode_time(
    preset: str,
    name: str,
    shape: Shape,
    batch: int,
    tokens: int,
    device: torch.device,
    repeats: int = 20,
    dtype: torch.dtype = torch.bfloat16,
) -> EncodeTime:
    """Encoding the keys and values of `tokens` tokens.

    Raises:
        ValueError: a preset that does not fit the shape.
    """
    plan = middle_layer(named_config(preset))
    choice: BackendChoice = "triton" if interpreting() else "auto"
    states: list[tuple[SideState, torch.Tensor]] = []
    for side in ("keys", "values"):
        made = encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, codes="random", batch=batch, device=device,
        )  # fmt: skip
        x = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, device=device, dtype=dtype)
        state = SideState(made.codec, x, 0, made.track)
        state.prepared = True  # the codec was, and fractional bits can be only once
        state.store.fix(tokens)
        states.append((state, x))
    backend = resolve_backend(choice, device, [state.codec for state, _ in states])
    for state, _ in states:
        state.codec = state.codec.on(backend)

    def encode() -> None:
        for state, x in states:
            state.store.truncate(0)
            state.pack(x, tokens, growing=False)

    time, size = median_ms(encode, device, repeats, flushes=FLUSHES), sum(x.nbytes for _, x in states)
    return EncodeTime(preset, name, batch, tokens, time, size / time / 1e6)
