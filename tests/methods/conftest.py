"""Fixtures of the methods' tests: codecs without a cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.method_cases import half_layout

from kvcache_compress.codecs.base import Codec, CodecContext
from kvcache_compress.config import get_method


@pytest.fixture
def make_codec() -> Callable[..., Codec]:
    """Function `make_codec(method, dim, side, seed, heads, sinks, **options)` that builds a codec."""

    def make(
        method: str, dim: int, side: Any = "keys", seed: int = 0, heads: int = 1, sinks: int = 16, **options: Any
    ) -> Codec:
        context = CodecContext(
            side=side,
            head_dim=dim,
            heads=heads,
            layer=0,
            seed=seed,
            sink_tokens=sinks,
            dtype=torch.float32,
            device=torch.device("cpu"),
            rope=half_layout(dim),
        )
        codec = get_method(method)
        return codec(codec.Options(**options), context)

    return make


@pytest.fixture
def unit_vectors() -> Callable[..., torch.Tensor]:
    """Function `unit_vectors(tokens, dim)`: vectors uniform on the sphere, float32 `[1, 1, tokens, dim]`."""

    def make(tokens: int, dim: int, seed: int = 1) -> torch.Tensor:
        x = torch.randn(1, 1, tokens, dim, generator=torch.Generator().manual_seed(seed))
        return x / x.norm(dim=-1, keepdim=True)

    return make
