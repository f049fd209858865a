"""PyTorch's decode attention, with queries apart or grouped."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvcache_compress.bench import compare, peers


@pytest.mark.parametrize("grouped_queries", [False, True])
def test_pytorchs_attention_with_queries_apart_or_grouped(grouped_queries: bool) -> None:
    query, keys, values = torch.randn(3, 4, 64), torch.randn(3, 2, 48, 64), torch.randn(3, 2, 48, 64)
    found = peers.sdpa(query, keys, values, [SDPBackend.MATH], grouped_queries)()
    torch.testing.assert_close(found, compare.plain_attention(query, keys, values, 64**-0.5))
