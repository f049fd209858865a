"""Nearest-neighbour search over compressed vectors: recall, stored bits and times (TurboQuant, section 4.4).

A base of unit vectors is compressed; queries, which stay as they are, are compared with all of it by inner product.
Recall 1@k is the share of queries whose true nearest neighbour is among the k that an index ranks first. The peers are
those of the paper, from faiss: product quantization with 256 centroids per group of coordinates (LUT256), trained on
the base itself, and RaBitQ with a random rotation and unquantized queries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from kvcache_compress.codecs.base import CodecContext, Fields
from kvcache_compress.codecs.quantizers.lloyd_max import lloyd_max_levels
from kvcache_compress.eval.provenance.artifacts import save_figure
from kvcache_compress.eval.reporting.drawing import COLORS, MARKERS, new_figure, style
from kvcache_compress.eval.reporting.report import markdown_table
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Values of k in recall 1@k."""
CENTROIDS = 256
"""Centroids of product quantization per group of coordinates."""
BLOCK_VECTORS = 8192
TURBOQUANTS: dict[str, dict[str, Any]] = {
    "TurboQuant mse (paper)": {"codebook": "lloyd_max", "scalar": "norm", "rotation": "haar"},
    "TurboQuant prod (paper)": {"estimator": "prod", "sketch": "gaussian", "rotation": "haar"},
    "TurboQuant unbiased": {"scalar": "unbiased"},
}


class Index(Protocol):
    """A searchable base of compressed vectors; making one does all that needs no vectors, such as rotations.

    Attributes:
        bits: stored per number, everything stored per vector included.
        shared_bytes: stored once for all vectors.
    """

    bits: float
    shared_bytes: int

    def add(self, base: torch.Tensor) -> None:
        """Train on unit vectors `[N, d]`, and store them."""

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        """Indices `[M, count]` of the `count` vectors ranked first for each query `[M, d]`."""


class TurboQuantIndex:
    """Vectors encoded by the codec that compresses keys; queries are scored as in attention."""

    def __init__(self, options: TurboQuantOptions, dim: int, seed: int) -> None:
        lloyd_max_levels.cache_clear()  # else only the first index would pay for its codebook
        context = CodecContext("keys", dim, 1, 0, seed, 0, torch.float32, torch.device("cpu"))
        self.codec = TurboQuantCodec(options, context)
        self.bits = self.codec.bits_per_number()
        self.shared_bytes = 0
        self.blocks: list[Fields] = []

    def add(self, base: torch.Tensor) -> None:
        self.codec.prepare(base[None, None])
        self.shared_bytes = self.codec.constant_bytes()
        self.blocks = [self.codec.encode(block[None, None]) for block in base.split(BLOCK_VECTORS)]

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        mapped = self.codec.map_query(queries[None, None])
        return torch.cat([self.codec.score(mapped, block)[0, 0] for block in self.blocks], 1).topk(count).indices


class FaissIndex:
    """An index of faiss, with its measured sizes."""

    def __init__(self, index: Any, bits: float, shared_bytes: int) -> None:
        self.index, self.bits, self.shared_bytes = index, bits, shared_bytes

    def add(self, base: torch.Tensor) -> None:
        self.index.train(base.numpy())
        self.index.add(base.numpy())

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        return torch.from_numpy(self.index.search(queries.numpy(), count)[1])


def _product_quantization(dim: int, bits: int) -> FaissIndex:
    faiss = require_faiss()
    index = faiss.IndexPQ(dim, dim * bits // 8, 8, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.min_points_per_centroid = 1  # else a warning per group of coordinates
    return FaissIndex(index, 8 * index.code_size / dim, 4 * CENTROIDS * dim)


def _rabitq(dim: int, bits: int, seed: int) -> FaissIndex:
    faiss = require_faiss()
    rotation = faiss.RandomRotationMatrix(dim, dim)
    rotation.init(seed)
    quantizer = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT, bits)
    quantizer.qb = 0
    return FaissIndex(faiss.IndexPreTransform(rotation, quantizer), 8 * quantizer.code_size / dim, 4 * dim * (dim + 1))


def builders(bits: int, dim: int, seed: int) -> dict[str, Callable[[], Index]]:
    """Constructors of the indexes to compare at a bit width, by name.

    Raises:
        ValueError: bits or a dimension that not all of them can take.
    """
    if bits not in (1, 2, 4):
        raise ValueError(f"bits={bits}: must be 1, 2 or 4, for which product quantization has whole groups")
    if dim % 8 or dim < 16:
        raise ValueError(f"embeddings of dimension {dim}: must be a multiple of 8, at least 16")

    def turboquant(options: dict[str, Any]) -> Callable[[], Index]:
        return lambda: TurboQuantIndex(TurboQuantOptions(bits=bits, **options), dim, seed)

    by_name: dict[str, Callable[[], Index]] = {name: turboquant(options) for name, options in TURBOQUANTS.items()}
    by_name["product quantization"] = lambda: _product_quantization(dim, bits)
    by_name["RaBitQ"] = lambda: _rabitq(dim, bits, seed)
    return by_name


def require_faiss() -> ModuleType:
    """Import faiss.

    Raises:
        ImportError: faiss is missing, or has no RaBitQ of several bits; with the remedy.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError('nearest neighbours need faiss: pip install "kvcache-compress[peers]"') from error
    if not hasattr(faiss, "IndexRaBitQ") or not hasattr(faiss.RaBitQuantizer, "nb_bits"):
        raise ImportError(f"faiss {faiss.__version__} has no RaBitQ of several bits: pip install --upgrade faiss-cpu")
    return faiss


@dataclass(frozen=True)
class NeighborRow:
    """Measurements of one index.

    Attributes:
        method: name of the index.
        bits: nominal; `stored_bits` per number include everything stored per vector.
        shared_bytes: stored once for all vectors.
        recall: recall 1@k by k.
        setup_seconds: all that needs no data: random rotations, TurboQuant's codebook.
        index_seconds: training on the base, and encoding all of it.
        search_seconds: all queries. All times are medians.
    """

    method: str
    bits: int
    stored_bits: float
    shared_bytes: int
    recall: dict[int, float]
    setup_seconds: float
    index_seconds: float
    search_seconds: float


def recall(ranked: torch.Tensor, products: torch.Tensor) -> dict[int, float]:
    """Recall 1@k from the ranked neighbours `[M, ≥ k]` and the true inner products `[M, N]`.

    Vectors as near as the nearest, up to the rounding of float32, count as the nearest.
    """
    best = products.max(1, keepdim=True).values
    hits = products.gather(1, ranked) >= best - 1e-6
    return {k: hits[:, :k].any(1).double().mean().item() for k in COUNTS}


def measure_neighbors(
    base: torch.Tensor,
    queries: torch.Tensor,
    bits: Sequence[int] = (2, 4),
    *,
    seed: int = 0,
    repeats: int = 3,
    threads: int = 1,
    on_progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[NeighborRow]:
    """Measure every index at every bit width.

    Args:
        base: unit vectors `[N, d]`, at least 256.
        queries: unit vectors `[M, d]`.
        bits: 1, 2 or 4.
        seed: of all random rotations.
        repeats: runs that times are medians of.
        threads: CPU threads of torch and faiss.
        on_progress: called with runs done, runs in all, and the next one's label.

    Raises:
        ValueError: sizes that are not allowed.
        ImportError: faiss is not installed.
    """
    for name, value, least in (("base", len(base), CENTROIDS), ("repeats", repeats, 1), ("threads", threads, 1)):
        if value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    todo = [
        (name, number, build)
        for number in dict.fromkeys(bits)
        for name, build in builders(number, base.shape[1], seed).items()
    ]
    products = queries @ base.T
    rows = []
    with _threads(threads):
        for done, (name, number, build) in enumerate(todo):
            times = []
            for repeat in range(repeats):
                on_progress(done * repeats + repeat, len(todo) * repeats, f"{name}, {number} bits")
                clock = [time.perf_counter()]
                index = build()
                clock.append(time.perf_counter())
                index.add(base)
                clock.append(time.perf_counter())
                ranked = index.search(queries, COUNTS[-1])
                clock.append(time.perf_counter())
                times.append([after - before for before, after in pairwise(clock)])
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            rows.append(NeighborRow(name, number, index.bits, index.shared_bytes, recall(ranked, products), *medians))
    on_progress(len(todo) * repeats, len(todo) * repeats, "neighbours")
    return rows


@contextmanager
def _threads(count: int) -> Iterator[None]:
    faiss = require_faiss()
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        faiss.omp_set_num_threads(before[1])


def neighbors_table(rows: Sequence[NeighborRow]) -> str:
    """Markdown table with a line per index."""
    shown = (1, 2, 4, 8, 64)
    heads = ["index", "bits", "bits stored", "shared KiB", *(f"1@{k}" for k in shown), "setup, s", "indexing, s"]
    lines = []
    for row in rows:
        sizes = [str(row.bits), f"{row.stored_bits:.2f}", f"{row.shared_bytes / 1024:.0f}"]
        times = (f"{seconds:.3f}" for seconds in (row.setup_seconds, row.index_seconds, row.search_seconds))
        lines.append([row.method, *sizes, *(f"{row.recall[k]:.3f}" for k in shown), *times])
    return markdown_table([*heads, "search, s"], lines) + "\n"


def plot_neighbors(rows: Sequence[NeighborRow], path: Path) -> None:
    """Plot recall by k for each bit width."""
    widths, names = sorted({row.bits for row in rows}), list(dict.fromkeys(row.method for row in rows))
    with style():
        figure = new_figure(4.4 * len(widths), 4.6)
        for panel, width in zip(figure.subplots(1, len(widths), squeeze=False)[0], widths, strict=True):
            for row in (row for row in rows if row.bits == width):
                order = names.index(row.method)
                look = {
                    "color": COLORS[order],
                    "marker": MARKERS[order],
                    "ls": "-" if row.method in TURBOQUANTS else "--",
                }
                panel.plot(list(row.recall), list(row.recall.values()), label=row.method, **look)
            panel.set_xscale("log", base=2)
            panel.set_xticks(COUNTS, [str(k) for k in COUNTS])
            panel.set(xlabel="k", ylabel="recall 1@k", title=f"{width} bits")
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save_figure(figure, path)
