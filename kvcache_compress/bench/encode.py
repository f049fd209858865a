"""Encoding the keys and values of a prompt, one layer's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..backend import BackendChoice, interpreting, resolve_backend
from ..config import CompressionConfig, load_config
from ..eval.results import error_message
from ..side import SideState
from .layers import Shape, encoded_side, middle_layer
from .timing import median_ms


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


def measure_encode(
    presets: Sequence[str],
    shapes: dict[str, Shape],
    batch: int,
    tokens: int,
    device: torch.device,
    repeats: int = 20,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[EncodeTime]:
    """Encoding a prompt of `tokens` for every preset and shape, as it is measured; what fails says why."""
    for name, shape in shapes.items():
        for preset in presets:
            try:
                time, size = _encode_time(load_config(preset), shape, batch, tokens, device, repeats, dtype)
                yield EncodeTime(preset, name, batch, tokens, time, size / time / 1e6)
            except Exception as error:
                yield EncodeTime(preset, name, batch, tokens, error=error_message(error))


def _encode_time(
    config: CompressionConfig,
    shape: Shape,
    batch: int,
    tokens: int,
    device: torch.device,
    repeats: int,
    dtype: torch.dtype,
) -> tuple[float, int]:
    """Milliseconds, and bytes of the keys and values."""
    plan = middle_layer(config)
    choice: BackendChoice = "triton" if interpreting() else "auto"
    states: list[tuple[SideState, torch.Tensor]] = []
    for side in ("keys", "values"):
        made = encoded_side(
            plan.side(side).method, plan.side(side).options(), side, shape.head_dim, dtype,
            heads=shape.kv_heads, packed=tokens, codes="random", batch=batch, device=device,
        )  # fmt: skip
        x = torch.randn(batch, shape.kv_heads, tokens, shape.head_dim, device=device, dtype=dtype)
        state = SideState(made.codec, x, 0, made.track)
        state.store.fix(tokens)
        states.append((state, x))
    backend = resolve_backend(choice, device, [state.codec for state, _ in states])

    def encode() -> None:
        for state, x in states:
            state.store.truncate(0)
            state.pack(x, tokens, backend, growing=False)

    with torch.inference_mode():
        return median_ms(encode, device, repeats), sum(x.nbytes for _, x in states)
