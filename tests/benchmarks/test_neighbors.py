"""Nearest neighbours: recall by hand, TurboQuant's index against its decoded vectors, and stored bits."""

import pytest
import torch

pytest.importorskip("faiss")

from neighbors import COUNTS, TURBOQUANTS, TurboQuantIndex, measure, recall

DIM = 32


def clustered(count: int, seed: int) -> torch.Tensor:
    """Unit vectors around 40 centres, the same ones for all seeds."""
    centres = torch.randn(40, DIM, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    x = centres[torch.randint(40, (count,), generator=generator)] + torch.randn(count, DIM, generator=generator) / 2
    return x / x.norm(dim=1, keepdim=True)


def test_recall_by_hand() -> None:
    products = torch.tensor([[0.9, 0.5, 0.1, 0.0], [0.2, 0.8, 0.3, 0.1], [0.7, 0.1, 0.7, 0.0], [0.1, 0.2, 0.3, 0.4]])
    found = torch.tensor([[0, 1, 2], [2, 1, 0], [2, 1, 3], [0, 1, 2]])
    # Found first; found second; found first, one of two that are equally near; not found.
    assert recall(found, products) == {1: 0.5, **dict.fromkeys(COUNTS[1:], 0.75)}


def test_turboquant_ranks_by_its_decoded_vectors() -> None:
    base, queries = clustered(300, 1), clustered(20, 2)
    index = TurboQuantIndex(TURBOQUANTS["TurboQuant prod (paper)"], 2, DIM, seed=3)
    index.add(base)
    decoded = index.codec.decode(index.stored)[0, 0]
    assert 0.05 < (decoded - base).square().sum(1).mean() < 1
    assert torch.equal(index.search(queries, 5), (queries @ decoded.T).topk(5).indices)


def test_stored_bits_and_recall() -> None:
    rows = measure(clustered(400, 1), clustered(100, 2), [2, 4], repeats=1)
    found = {(row["method"], row["bits"]): row for row in rows}
    for bits in (2, 4):
        # One scale of 16 bits per vector, another for the sketch; 20 bytes of factors in RaBitQ; nothing in PQ.
        assert found["TurboQuant unbiased", bits]["stored_bits"] == bits + 16 / DIM
        assert found["TurboQuant prod (paper)", bits]["stored_bits"] == bits + 32 / DIM
        assert found["product quantization", bits]["stored_bits"] == bits
        assert found["RaBitQ", bits]["stored_bits"] == bits + 160 / DIM
    for name in ("TurboQuant unbiased", "product quantization", "RaBitQ"):
        assert found[name, 4]["recall"][1] > found[name, 2]["recall"][1] > 0.1
