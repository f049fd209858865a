"""Tensor parallelism over two processes: the same tokens as in one, with every method."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.files.commvq_files import random_codebooks, random_encoder
from support.files.spectral_files import statistics_of
from support.kernels import tensor_parallel_worker
from support.models.ranks import as_process
from support.models.small_model import HEAD_DIM, small_config, small_model
from support.paths import ROOT
from transformers import LlamaConfig

from kvcache_compress.codecs.base import CodecContext
from kvcache_compress.methods.commvq.codebook_file import write_codebooks
from kvcache_compress.methods.commvq.codec import CommVQCodec, CommVQOptions
from kvcache_compress.modeling.rope import rope_layout

KV_HEADS = 4


def config() -> LlamaConfig:
    return small_config(num_key_value_heads=KV_HEADS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of the model, of codebooks that differ from head to head, and of codebooks with an encoder."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    small_model(num_key_value_heads=KV_HEADS).save_pretrained(folder / "model")
    paths = {name: str(folder / name) for name in ("model", "results", "codebooks", "encoder")}
    paths["statistics"] = statistics_of(config(), "tensor-parallel")
    books = random_codebooks(config(), 1, (3, 16), (5, 16))
    write_codebooks(paths["codebooks"], config(), books)
    keys = {name: tensor for name, tensor in books.items() if name.startswith("keys")}
    write_codebooks(paths["encoder"], config(), keys | random_encoder(config(), 64 * KV_HEADS))
    return paths


@pytest.fixture(scope="module")
def found(files: dict[str, str]) -> dict[str, Any]:
    """Results of rank 0 of two processes."""
    here = ROOT / "tests"
    worker = here / "support" / "kernels" / "tensor_parallel_worker.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    names = ("model", "results", "codebooks", "encoder", "statistics")
    command = [*launch, str(worker), *(files[name] for name in names)]
    paths = os.pathsep.join(path for path in (str(here), os.environ.get("PYTHONPATH")) if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return torch.load(files["results"])


def test_same_as_one_process(files: dict[str, str], found: dict[str, Any]) -> None:
    """Tokens are equal, logits to rounding; each process holds half of the heads, whose keys are coded as in one."""
    model = small_model(num_key_value_heads=KV_HEADS)
    for name, fused, cache in tensor_parallel_worker.cases(files["codebooks"], files["statistics"]):
        sequences, logits, (packed, heads), keys = tensor_parallel_worker.generate(model, fused, cache)
        got = found[f"{name}-{fused}"]
        assert got[2] == [packed, heads // 2]
        assert packed >= 32
        assert torch.equal(got[0], sequences), name
        # A number of the statistics on the edge between two of 16 bits takes another, and moves codes of its head.
        torch.testing.assert_close(got[1], logits, atol=5e-3 if name == "spectral-prefill" else 1e-3, rtol=0)
        own = keys[:, : heads // 2]
        close = (got[3] - own).norm(dim=-1) <= 2e-3 * own.norm(dim=-1)
        assert close.float().mean() > 0.99, f"{name}: keys of other codes, but for ties"
        if (name, fused) == ("commvq", True):
            copy = found["data-parallel"]
            assert torch.equal(copy[0], sequences)
            assert torch.equal(copy[1], logits)
            assert copy[2] == [packed, heads]


def test_an_encoder_cannot_be_shared_out(found: dict[str, Any]) -> None:
    assert "needs all 4 heads of a token together, and tensor parallelism leaves 2 here" in found["encoder"]


def codec(path: str, heads: int, side: str = "keys", head_dim: int = HEAD_DIM) -> CommVQCodec:
    layout = rope_layout(config(), HEAD_DIM)
    context = CodecContext(side, head_dim, heads, 1, 0, 0, torch.float32, torch.device("cpu"), layout)
    return CommVQCodec(CommVQOptions(codebooks=path), context)


@pytest.mark.parametrize(
    ("heads", "rank", "processes", "first"), [(4, 3, 4, 0), (2, 1, 2, 2), (2, 2, 4, 0), (2, 3, 4, 2), (1, 3, 4, 3)]
)
def test_share_of_a_rank(files: dict[str, str], heads: int, rank: int, processes: int, first: int) -> None:
    """A process with all heads loads all codebooks, else those of its rank within its tensor-parallel group."""
    everything = codec(files["codebooks"], KV_HEADS)
    with as_process(rank, processes):
        own = codec(files["codebooks"], heads)
    assert torch.equal(own.books.books, everything.books.books[first : first + heads])
    assert own.constant_bytes() == everything.constant_bytes() * heads // KV_HEADS


@pytest.mark.parametrize(("heads", "processes"), [(2, 1), (2, 3), (3, 3), (8, 2)])
def test_heads_that_fit_no_share(files: dict[str, str], heads: int, processes: int) -> None:
    message = f"made for 4 heads of 32, not {heads} of 32 in each of {processes} process"
    with as_process(0, processes), pytest.raises(ValueError, match=message):
        codec(files["codebooks"], heads)
