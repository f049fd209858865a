"""Decode attention of other libraries over uncompressed keys and values, if they are installed.

Each function takes queries `[B, Hq, D]` and keys and values `[B, T, H, D]` and returns a function without arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

PAGE = 16
WORKSPACE_BYTES = 128 << 20
"""Size of FlashInfer's workspace, as its documentation suggests."""


def flash_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlashAttention's kernel for decoding, which splits the tokens over multiprocessors."""
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    tokens = torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device=keys.device)
    return lambda: attend(query[:, None], keys, values, cache_seqlens=tokens)[:, 0]


def flashinfer(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
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


PEERS = {"flash_attn": flash_attention, "flashinfer": flashinfer}


def installed() -> list[str]:
    """Names of `PEERS` that can be imported."""
    return [name for name in PEERS if find_spec(name) is not None]
