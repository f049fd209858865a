"""Decode attention over uncompressed keys and values, by PyTorch and by other libraries where they are installed.

Each function takes queries `[B, Hq, D]`, and keys and values in the order that it is fastest with, and returns a
function without arguments whose result is `[B, Hq, D]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[], torch.Tensor]
Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Attend]
PAGE = 16
WORKSPACE_BYTES = 128 << 20
"""Size of FlashInfer's workspace, as its documentation suggests."""


def sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, backends: list[SDPBackend], grouped: bool = False
) -> Attend:
    """PyTorch's attention; `grouped` hands over the queries that share a key/value head as so many tokens of one."""
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


def flash_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attend:
    """FlashAttention's kernel for decoding, which splits the tokens over multiprocessors."""
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    tokens = torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device=keys.device)
    return lambda: attend(query[:, None], keys, values, cache_seqlens=tokens)[:, 0]


def flashinfer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attend:
    """FlashInfer's batched decoding, planned beforehand, as an engine does once per step for all layers.

    Raises:
        ValueError: the number of tokens is no multiple of the page size.
    """
    batch, tokens, heads, dim = keys.shape
    if tokens % PAGE:
        raise ValueError(f"{tokens} tokens for flashinfer: allowed multiples of {PAGE}")
    pages = batch * tokens // PAGE
    device = keys.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=query.shape[1] > heads
    )
    wrapper.plan(
        torch.arange(0, pages + 1, tokens // PAGE, dtype=torch.int32, device=device),
        torch.arange(pages, dtype=torch.int32, device=device),
        torch.full((batch,), PAGE, dtype=torch.int32, device=device),
        query.shape[1], heads, dim, PAGE, q_data_type=query.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip
    paged = tuple(x.view(pages, PAGE, heads, dim) for x in (keys, values))
    return lambda: wrapper.run(query, paged)


OTHERS: dict[str, Peer] = {"flash_attn": flash_attention, "flashinfer": flashinfer}
"""Other libraries' attention, by the name of their module; keys and values are `[B, T, H, D]`, else `[B, H, T, D]`."""
ON_GPU: dict[str, Peer] = {
    "sdpa flash": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION]),
    "sdpa flash, grouped": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION], grouped=True),
    "sdpa cudnn, grouped": partial(sdpa, backends=[SDPBackend.CUDNN_ATTENTION], grouped=True),
    "flex": flex,
}
ON_CPU: dict[str, Peer] = {"sdpa": partial(sdpa, backends=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}


def peers(device: torch.device) -> dict[str, Peer]:
    """Attention to compare with on a device, by name: PyTorch's, and on a GPU that of libraries that are installed."""
    if device.type != "cuda":
        return dict(ON_CPU)
    return ON_GPU | {name: attend for name, attend in OTHERS.items() if find_spec(name) is not None}
