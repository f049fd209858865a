"""Time the encoding of a prompt's keys and values, for one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcache_compress.backends.choice import BACKENDS, resolve_backend
from kvcache_compress.bench.layers import Shape, encoded_side, middle_layer, named_config
from kvcache_compress.bench.timing import median_ms
from kvcache_compress.codecs.device import interpreting
from kvcache_compress.storage.padding import PaddingRecord
from kvcache_compress.storage.side import SideState, Windows

FLUSHES = 16
"""Cache flushes before a call: about four milliseconds, enough for Python to queue all launches of a prompt."""


@dataclass(frozen=True)
class EncodeTime:
    """Time of encoding with one preset, shape, batch and length.

    Attributes:
        cache: preset.
        shape: name of the model's shape.
        tokens: tokens whose keys and values are encoded.
        milliseconds: median time of one layer.
        gigabytes_per_second: bytes of the uncompressed keys and values, divided by that time.
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
    """Time the encoding of the keys and values of `tokens` tokens.

    Raises:
        ValueError: the preset does not support the shape.
    """
    plan = middle_layer(named_config(preset))
    choice = "triton" if interpreting() else "auto"
    states: list[tuple[SideState, torch.Tensor]] = []
    for side in ("keys", "values"):
        layer_side = encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, codes="random", batch=batch, device=device,
        )  # fmt: skip
        x = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, device=device, dtype=dtype)
        windows = Windows(0, 0, 0, layer_side.codec.group)
        state = SideState(layer_side.codec, x, windows, BACKENDS["torch"], layer_side.track, PaddingRecord())
        state.prepared = True  # the codec already is, and fractional bits can be prepared only once
        state.store.make_static(tokens)
        states.append((state, x))
    kinds = [(type(state.codec), state.codec.options, state.codec.context.side) for state, _ in states]
    backend = resolve_backend(choice, device, kinds)
    for state, _ in states:
        state.codec = backend.bind(state.codec)

    def encode() -> None:
        for state, x in states:
            state.store.truncate(0)
            backend.pack(state, x, tokens, growing=False)

    time, size = median_ms(encode, device, repeats, flushes=FLUSHES), sum(x.nbytes for _, x in states)
    return EncodeTime(preset, name, batch, tokens, time, size / time / 1e6)
