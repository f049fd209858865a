"""PyTorch's decode attention over uncompressed keys and values, to compare with.

Each function takes queries `[B, Hq, D]` and keys and values `[B, H, T, D]`, and returns a function without arguments
that returns `[B, Hq, D]`.
"""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[], torch.Tensor]
Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Attend]


def sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, backends: list[SDPBackend], grouped: bool = False
) -> Attend:
    """PyTorch's SDPA. With `grouped`, the queries that share a key/value head are passed as tokens of one head."""
    heads = keys.shape[1]
    rows = query.unflatten(1, (heads, -1)) if grouped else query[:, :, None]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backends):
            return scaled_dot_product_attention(rows, keys, values, enable_gqa=not grouped).reshape(query.shape)

    return attend


def flex(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attend:
    """PyTorch's flex attention, compiled for decoding."""
    attend = _compiled_flex()
    return lambda: attend(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


@cache
def _compiled_flex() -> Any:
    return torch.compile(importlib.import_module("torch.nn.attention.flex_attention").flex_attention)


ON_GPU: dict[str, Peer] = {
    "sdpa flash": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION]),
    "sdpa flash, grouped": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION], grouped=True),
    "sdpa cudnn, grouped": partial(sdpa, backends=[SDPBackend.CUDNN_ATTENTION], grouped=True),
    "flex": flex,
}
ON_CPU: dict[str, Peer] = {"sdpa": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}
