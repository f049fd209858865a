"""PyTorch's decode attention, with queries apart or grouped."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvcache_compress.bench import compare, decode, peers
from kvcache_compress.bench.layers import Shape

CPU = torch.device("cpu")
TINY = {"tiny": Shape(4, 2, 64)}


class FlashInferWrapper:
    """FlashInfer's batched decoding as its documentation describes it, for pages of 16 tokens."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr, indices, last_page_len, query_heads, heads, dim, page, q_data_type, kv_data_type) -> None:  # type: ignore[no-untyped-def]
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        assert (query_heads, heads, dim, page) == (4, 2, 64, 16)
        assert q_data_type == kv_data_type == torch.bfloat16
        self.pages = [indices[a:b] for a, b in itertools.pairwise(indptr)]
        self.last = last_page_len

    def run(self, query: torch.Tensor, paged: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = []
        for row, own, last in zip(query, self.pages, self.last, strict=True):
            keys, values = (x[own].flatten(0, 1)[: (len(own) - 1) * 16 + last] for x in paged)
            found.append(grouped(row[None], keys[None], values[None])[0])
        return torch.stack(found)


def flash_attn_with_kvcache(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache_seqlens: torch.Tensor
) -> torch.Tensor:
    assert cache_seqlens.tolist() == [keys.shape[1]] * len(query)
    return grouped(query[:, 0], keys, values)[:, None]


def grouped(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Plain attention of `[B, Hq, D]` over `[B, T, H, D]`."""
    groups = query.shape[1] // keys.shape[2]
    keys, values = (x.repeat_interleave(groups, 2).double() for x in (keys, values))
    weights = (torch.einsum("bhd,bthd->bht", query.double(), keys) / query.shape[2] ** 0.5).softmax(-1)
    return torch.einsum("bht,bthd->bhd", weights, values).to(query.dtype)


def test_other_libraries_are_called_as_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the libraries accept the arguments that their documentation names."""
    for name, stand_in in (
        ("flashinfer", {"BatchDecodeWithPagedKVCacheWrapper": FlashInferWrapper}),
        ("flash_attn", {"flash_attn_with_kvcache": flash_attn_with_kvcache}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=ModuleSpec(name, None), **stand_in))
    assert [*peers.peers(torch.device("cuda"))] == [*peers.ON_GPU, "flash_attn", "flashinfer"]
    query = torch.randn(3, 4, 64, dtype=torch.bfloat16)
    keys, values = (torch.randn(3, 48, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    by_head = keys.transpose(1, 2), values.transpose(1, 2)
    expected = compare.plain_attention(query.float(), *(x.float() for x in by_head), 64**-0.5).to(torch.bfloat16)
    for attend in peers.OTHERS.values():
        torch.testing.assert_close(attend(query, keys, values)(), expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(ValueError, match="40 tokens for flashinfer: allowed multiples of 16"):
        peers.flashinfer(query, keys[:, :40], values[:, :40])
    rows = decode.measure_decode([], TINY, [1], [64], CPU, 1)
    assert [[*(row.libraries or ())] for row in rows] == [["sdpa"]]  # on CPUs there is nothing of theirs


@pytest.mark.parametrize("grouped_queries", [False, True])
def test_pytorchs_attention_with_queries_apart_or_grouped(grouped_queries: bool) -> None:
    query, keys, values = torch.randn(3, 4, 64), torch.randn(3, 2, 48, 64), torch.randn(3, 2, 48, 64)
    found = peers.sdpa(query, keys, values, [SDPBackend.MATH], grouped_queries)()
    torch.testing.assert_close(found, compare.plain_attention(query, keys, values, 64**-0.5))
