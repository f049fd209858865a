"""Nearest neighbours: recall by hand, each index against its own decoded vectors, stored bits, its command."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvcache_compress.eval.cli.app import app
from kvcache_compress.eval.studies.neighbors import (
    COUNTS,
    TURBOQUANTS,
    TurboQuantIndex,
    builders,
    measure_neighbors,
    recall,
    require_faiss,
)
from kvcache_compress.methods.turboquant.codec import TurboQuantOptions

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


@pytest.mark.parametrize("name", TURBOQUANTS)
def test_turboquant_ranks_by_its_decoded_vectors(name: str) -> None:
    base, queries = clustered(300, 1), clustered(20, 2)
    index = TurboQuantIndex(TurboQuantOptions(bits=2, **TURBOQUANTS[name]), DIM, seed=3)
    index.add(base)
    decoded = torch.cat([index.codec.decode(block)[0, 0] for block in index.blocks])
    assert 0.05 < (decoded - base).square().sum(1).mean() < 1
    assert torch.equal(index.search(queries, 5), (queries @ decoded.T).topk(5).indices)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    base, queries = clustered(300, 1), clustered(20, 2)
    whole, parts = (TurboQuantIndex(TurboQuantOptions(bits=2), DIM, seed=3) for _ in range(2))
    whole.add(base)
    monkeypatch.setattr("kvcache_compress.eval.studies.neighbors.BLOCK_VECTORS", 64)
    parts.add(base)
    assert len(parts.blocks) == 5
    assert torch.equal(whole.search(queries, 9), parts.search(queries, 9))


def test_all_indexes() -> None:
    faiss = pytest.importorskip("faiss")
    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    rows = measure_neighbors(clustered(400, 1), clustered(100, 2), [2, 4], repeats=1)
    assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == threads
    found = {(row.method, row.bits): row for row in rows}
    assert len(found) == len(rows) == 2 * (len(TURBOQUANTS) + 2)
    for bits in (2, 4):
        # One scale of 16 bits per vector, another for the sketch; 20 bytes of factors in RaBitQ; nothing in PQ.
        assert found["TurboQuant unbiased", bits].stored_bits == bits + 16 / DIM
        assert found["TurboQuant prod (paper)", bits].stored_bits == bits + 32 / DIM
        assert found["product quantization", bits].stored_bits == bits
        assert found["RaBitQ", bits].stored_bits == bits + 160 / DIM
    for row in rows:
        ranked = [row.recall[k] for k in COUNTS]
        assert ranked == sorted(ranked)
        assert ranked[-1] > 0.9
        assert min(row.index_seconds, row.search_seconds) > 0
    for name in ("TurboQuant unbiased", "product quantization", "RaBitQ"):
        assert found[name, 4].recall[1] > found[name, 2].recall[1] > 0.1
    assert found["TurboQuant unbiased", 4].recall[1] > 0.6


def test_arguments() -> None:
    pytest.importorskip("faiss")
    base = clustered(300, 1)
    with pytest.raises(ValueError, match="bits=3"):
        measure_neighbors(base, base, [3])
    with pytest.raises(ValueError, match="dimension 30"):
        builders(2, 30, 0)
    with pytest.raises(ValueError, match="base=200"):
        measure_neighbors(base[:200], base)
    for name in ("repeats", "threads"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            measure_neighbors(base, base, **{name: 0})


def test_missing_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match="pip install"):
        require_faiss()


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    np.save(tmp_path / "x.npy", clustered(340, 1).numpy())
    given: list[Any] = ["--embeddings", tmp_path / "x.npy", "--base", 300, "--bits", 2, "--repeats", 1]
    arguments = [str(word) for word in [*given, "--output", tmp_path / "out", "--queries", 40]]
    done = CliRunner().invoke(app, ["neighbors", *arguments])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "neighbors.json").read_text(encoding="utf-8"))
    assert (result["dim"], result["base"], result["queries"], result["threads"]) == (DIM, 300, 40, 1)
    assert result["versions"]["faiss-cpu"]
    assert set(result["rows"][0]["recall"]) == {str(k) for k in COUNTS}
    assert (tmp_path / "out" / "neighbors.md").read_text(encoding="utf-8").count("\n") == 2 + len(TURBOQUANTS) + 2
    assert (tmp_path / "out" / "neighbors.png").read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["neighbors", *arguments, "--queries", "50"])
    assert done.exit_code == 1
    assert "together at most 340" in done.output
