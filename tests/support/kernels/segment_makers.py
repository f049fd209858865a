"""Layers built from random tokens, for tests of attention, and a fixture that poisons uninitialised memory.

Triton's kernels run where `support/device.py` says.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvcache_compress.codecs.base import Codec, Side
from kvcache_compress.modeling.rope import RopeLayout
from kvcache_compress.storage.adaptive.eras import Era
from kvcache_compress.storage.packed_store import PackedStore
from kvcache_compress.storage.view import View
from support import method_cases
from support.kernels.device import DEVICE
from support.method_cases import half_layout, random_track


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill results of `torch.empty` and the like with NaN or the largest integer, to reveal stale reads."""
    torch.use_deterministic_algorithms(True, warn_only=DEVICE.type != "cpu")
    with DEVICE:
        assert torch.empty(1).isnan().all()
        yield
    torch.use_deterministic_algorithms(False)


def make_codec(
    method: str,
    options: dict[str, Any] | Callable[[int], dict[str, Any]],
    side: Side,
    head_dim: int,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    layout: RopeLayout | None = None,
) -> Codec:
    """A codec, not yet prepared; options may depend on the head dimension."""
    options = options(head_dim) if callable(options) else options
    rope = layout or half_layout(head_dim)
    return method_cases.make_codec(
        method, head_dim, side, heads=heads, layer=2, dtype=dtype, device=DEVICE, rope=rope, **options
    )


def make_side(
    method: str,
    options: dict[str, Any] | Callable[[int], dict[str, Any]],
    side: Side,
    head_dim: int,
    packed: int,
    *,
    batch: int = 2,
    heads: int = 2,
    sinks: int = 3,
    tail: int = 5,
    dtype: torch.dtype = torch.float32,
    layout: RopeLayout | None = None,
    outlier: int | None = None,
) -> View:
    """One side of a layer with random tokens in it.

    The store has room for more tokens than are packed, and the tail lies in a bigger buffer; both hold poison
    beyond what is used. With an `outlier`, this channel is twice as large, and all others are a tenth as large.
    """
    codec = make_codec(method, options, side, head_dim, heads, dtype, layout)
    scale = torch.rand(heads, 1, head_dim) + 0.5
    tokens = torch.randn(batch, heads, sinks + packed + tail + 64, head_dim) * scale
    if side == "keys":
        tokens += 0.7 * torch.randn(heads, 1, head_dim)
    if outlier is not None:
        tokens *= 0.1
        tokens[..., outlier] *= 20
    tokens = tokens.to(dtype)
    codec.prepare(tokens)
    store = PackedStore(codec.fields, batch, heads, DEVICE)
    track = None
    if codec.rope_use(codec.options, side) == "factors":
        track = random_track(layout or half_layout(head_dim), batch, sinks + packed + tail, sinks, codec.group)
    if packed:
        rope = None if track is None else track.read(0, packed)
        store.append(codec.encode(tokens[:, :, sinks : sinks + packed], rope), packed, growing=True)
    buffer = torch.empty(batch, heads, tail + 11, head_dim, dtype=dtype)
    buffer[:, :, :tail] = tokens[:, :, sinks + packed : sinks + packed + tail]
    return View(tokens[:, :, :sinks].contiguous(), store, packed, buffer, tail, (Era(0, codec),), track)
