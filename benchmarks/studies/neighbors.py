"""Nearest-neighbour search over compressed vectors: recall, stored bits and times (TurboQuant, section 4.4).

    python benchmarks/studies/neighbors.py --text eval/tasks/default_text.txt

writes `results/experiments/neighbors.json`. The vectors are a model's last hidden states. Recall 1@k is the share of
queries whose true nearest neighbour, by inner product, is among the k that an index ranks first. The peers are those
of the paper, from faiss: product quantization with 256 centroids per group of coordinates, trained on the base itself,
and RaBitQ with a random rotation and unquantized queries. TurboQuant runs in torch and its peers in C++, so times
compare implementations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol

import faiss
import torch
import typer

from kvcache_compress.codecs.base import CodecContext, Fields
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels
from kvcache_compress.eval.provenance.results import write_json
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions
from kvcache_compress.modeling.loading import load_model

RESULT = Path(__file__).resolve().parents[1] / "results" / "experiments" / "neighbors.json"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Values of k in recall 1@k."""
CENTROIDS, WINDOW = 256, 512
TURBOQUANTS: dict[str, dict[str, Any]] = {
    "TurboQuant mse (paper)": {"codebook": "lloyd_max", "scalar": "norm"},
    "TurboQuant prod (paper)": {"estimator": "prod", "sketch": "gaussian"},
    "TurboQuant unbiased": {"scalar": "unbiased"},
}


class Index(Protocol):
    """A searchable base of compressed vectors: bits stored per number, and bytes stored once for all vectors."""

    bits: float
    shared_bytes: int

    def add(self, base: torch.Tensor) -> None:
        """Train on unit vectors `[N, d]`, and store them."""

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        """Indices `[M, count]` of the vectors ranked first for each query `[M, d]`."""


class TurboQuantIndex:
    """Vectors encoded by the codec that compresses keys; queries are scored as in attention."""

    def __init__(self, options: dict[str, Any], bits: int, dim: int, seed: int) -> None:
        lloyd_max_levels.cache_clear()  # else only the first index would pay for its codebook
        context = CodecContext("keys", dim, 1, 0, seed, 0, torch.float32, torch.device("cpu"))
        self.codec = TurboQuantCodec(TurboQuantOptions(bits=bits, **options), context)
        self.bits, self.shared_bytes = self.codec.bits_per_number(), 0
        self.stored: Fields = ()

    def add(self, base: torch.Tensor) -> None:
        self.codec.prepare(base[None, None])
        self.shared_bytes = self.codec.constant_bytes()
        self.stored = self.codec.encode(base[None, None])

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        scores = self.codec.score(self.codec.map_query(queries[None, None]), self.stored)
        return scores[0, 0].topk(count).indices


class FaissIndex:
    def __init__(self, index: Any, bits: float, shared_bytes: int) -> None:
        self.index, self.bits, self.shared_bytes = index, bits, shared_bytes

    def add(self, base: torch.Tensor) -> None:
        self.index.train(base.numpy())
        self.index.add(base.numpy())

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        return torch.from_numpy(self.index.search(queries.numpy(), count)[1])


def builders(bits: int, dim: int, seed: int) -> dict[str, Callable[[], Index]]:
    """Constructors of the indexes to compare, by name; bits are 1, 2 or 4, and the dimension is a multiple of 8."""

    def product_quantization() -> Index:
        index = faiss.IndexPQ(dim, dim * bits // 8, 8, faiss.METRIC_INNER_PRODUCT)
        index.pq.cp.min_points_per_centroid = 1  # else a warning per group of coordinates
        return FaissIndex(index, 8 * index.code_size / dim, 4 * CENTROIDS * dim)

    def rabitq() -> Index:
        rotation = faiss.RandomRotationMatrix(dim, dim)
        rotation.init(seed)
        quantizer: Any = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT, bits)
        quantizer.qb = 0
        index = faiss.IndexPreTransform(rotation, quantizer)
        return FaissIndex(index, 8 * quantizer.code_size / dim, 4 * dim * (dim + 1))

    def turboquant(options: dict[str, Any]) -> Callable[[], Index]:
        return lambda: TurboQuantIndex(options, bits, dim, seed)

    by_name = {name: turboquant(options) for name, options in TURBOQUANTS.items()}
    return by_name | {"product quantization": product_quantization, "RaBitQ": rabitq}


def recall(ranked: torch.Tensor, products: torch.Tensor) -> dict[int, float]:
    """Recall 1@k from the ranked neighbours `[M, ≥ k]` and the true inner products `[M, N]`.

    Vectors as near as the nearest, up to the rounding of float32, count as the nearest.
    """
    best = products.max(1, keepdim=True).values
    hits = products.gather(1, ranked) >= best - 1e-6
    return {k: hits[:, :k].any(1).double().mean().item() for k in COUNTS}


@torch.inference_mode()
def hidden_states(model: str, text: Path, count: int) -> torch.Tensor:
    """Unit vectors `[count, d]`: last hidden states of windows, without each window's first token."""
    loaded, tokenizer = load_model(model)
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    states = []
    for part in torch.tensor(ids[: count + count // WINDOW + WINDOW]).split(WINDOW):
        output = loaded(input_ids=part[None], output_hidden_states=True, use_cache=False, logits_to_keep=1)
        states.append(output.hidden_states[-1][0, 1:])
    found = torch.cat(states)[:count]
    if len(found) < count:
        raise ValueError(f"text={str(text)!r} gives {len(found)} vectors, but --base and --queries need {count}")
    return found / found.norm(dim=1, keepdim=True)


def measure(
    base: torch.Tensor, queries: torch.Tensor, bits: list[int], seed: int = 0, repeats: int = 3
) -> list[dict[str, Any]]:
    """Measure every index at every bit width; times are medians."""
    products = queries @ base.T
    rows = []
    for number in bits:
        for name, build in builders(number, base.shape[1], seed).items():
            times = []
            for _ in range(repeats):
                clock = [time.perf_counter()]
                index = build()
                clock.append(time.perf_counter())
                index.add(base)
                clock.append(time.perf_counter())
                ranked = index.search(queries, COUNTS[-1])
                clock.append(time.perf_counter())
                times.append([after - before for before, after in pairwise(clock)])
            row = {"method": name, "bits": number, "stored_bits": index.bits, "shared_bytes": index.shared_bytes}
            seconds = map(statistics.median, zip(*times, strict=True))
            names = ("setup_seconds", "index_seconds", "search_seconds")
            rows.append(row | {"recall": recall(ranked, products)} | dict(zip(names, seconds, strict=True)))
    return rows


def main(
    text: Annotated[Path, typer.Option(help="Text file that the model reads.")],
    model: str = "smollm2-135m",
    bits: Annotated[list[int], typer.Option(help="Bits per number: 1, 2 or 4. Repeatable.")] = [2, 4],  # noqa: B006
    base: Annotated[int, typer.Option(help="Vectors to search.", min=CENTROIDS)] = 4000,
    queries: Annotated[int, typer.Option(help="Vectors to find the nearest neighbours of.", min=1)] = 400,
    output: Path = RESULT,
) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    vectors = hidden_states(model, text, base + queries)
    vectors = vectors[torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))]
    rows = measure(vectors[:base], vectors[base:], bits)
    about = {"source": f"{model}, {text.name}", "dim": vectors.shape[1], "base": base, "queries": queries}
    write_json(output, about | {"rows": rows}, torch.device("cpu"), "faiss-cpu")
    lines = [
        [row["method"], str(row["bits"]), f"{row['stored_bits']:.2f}", f"{row['recall'][1]:.3f}"]
        + [f"{row[name]:.3f}" for name in ("setup_seconds", "index_seconds", "search_seconds")]
        for row in rows
    ]
    print(markdown_table(["index", "bits", "stored", "1@1", "setup, s", "indexing, s", "search, s"], lines))


if __name__ == "__main__":
    typer.run(main)
