"""Indexes of compressed vectors, searched by inner product: TurboQuant, and the peers of its section 4.4 from faiss."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from kvcache_compress.codecs.base import CodecContext, Fields
from kvcache_compress.codecs.lloyd_max import lloyd_max_levels
from kvcache_compress.methods.turboquant.codec import TurboQuantCodec, TurboQuantOptions

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
    """

    bits: float

    def shared_bytes(self) -> int:
        """Bytes stored once for all vectors: rotations, codebooks, a mean."""

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
        self.blocks: list[Fields] = []

    def shared_bytes(self) -> int:
        return self.codec.constant_bytes()

    def add(self, base: torch.Tensor) -> None:
        self.codec.prepare(base[None, None])
        self.blocks = [self.codec.encode(block[None, None]) for block in base.split(BLOCK_VECTORS)]

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        mapped = self.codec.map_query(queries[None, None])
        scores = torch.cat([self.codec.score(mapped, block)[0, 0] for block in self.blocks], 1)
        return scores.topk(count).indices


class FaissIndex:
    """An index of faiss, with its measured sizes."""

    def __init__(self, index: Any, bits: float, shared_bytes: int) -> None:
        self.index, self.bits, self._shared_bytes = index, bits, shared_bytes

    def shared_bytes(self) -> int:
        return self._shared_bytes

    def add(self, base: torch.Tensor) -> None:
        self.index.train(base.numpy())
        self.index.add(base.numpy())

    def search(self, queries: torch.Tensor, count: int) -> torch.Tensor:
        return torch.from_numpy(self.index.search(queries.numpy(), count)[1])


def product_quantization(dim: int, bits: int) -> FaissIndex:
    """faiss's `IndexPQ` with 8-bit codes for groups of 8 / bits coordinates (the paper's LUT256)."""
    faiss = require_faiss()
    index = faiss.IndexPQ(dim, dim * bits // 8, 8, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.min_points_per_centroid = 1  # else a warning per group of coordinates
    return FaissIndex(index, 8 * index.code_size / dim, 4 * CENTROIDS * dim)


def rabitq(dim: int, bits: int, seed: int) -> FaissIndex:
    """faiss's `IndexRaBitQ` behind a random rotation; queries unquantized, as in the other indexes."""
    faiss = require_faiss()
    rotation = faiss.RandomRotationMatrix(dim, dim)
    rotation.init(seed)
    quantizer = faiss.IndexRaBitQ(dim, faiss.METRIC_INNER_PRODUCT, bits)
    quantizer.qb = 0
    index = faiss.IndexPreTransform(rotation, quantizer)
    return FaissIndex(index, 8 * quantizer.code_size / dim, 4 * dim * (dim + 1))


def builders(bits: int, dim: int, seed: int) -> dict[str, Callable[[], Index]]:
    """Constructors of the indexes to compare at a bit width, by name.

    Raises:
        ValueError: bits or a dimension that not all of them can take.
    """
    if bits not in (1, 2, 4):
        raise ValueError(f"bits={bits}: allowed 1, 2, 4, for which product quantization has whole groups")
    if dim % 8 or dim < 16:
        raise ValueError(f"embeddings of dimension {dim}: allowed multiples of 8 from 16 on")

    def turboquant(options: dict[str, Any]) -> Callable[[], Index]:
        return lambda: TurboQuantIndex(TurboQuantOptions(bits=bits, **options), dim, seed)

    by_name: dict[str, Callable[[], Index]] = {name: turboquant(options) for name, options in TURBOQUANTS.items()}
    by_name["product quantization"] = lambda: product_quantization(dim, bits)
    by_name["RaBitQ"] = lambda: rabitq(dim, bits, seed)
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
