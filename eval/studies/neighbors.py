"""Nearest-neighbour search over compressed vectors: recall, stored bits and times (TurboQuant, section 4.4).

A base of unit vectors is compressed; queries, which stay as they are, are compared with all of it by inner product.
Recall 1@k is the share of queries whose true nearest neighbour is among the k that an index ranks first. The peers are
those of the paper, from faiss: product quantization with 256 centroids per group of coordinates, trained on the base
itself, and RaBitQ with a random rotation and unquantized queries.

    kvcache-compress eval neighbors --model smollm2-135m --text TEXT.txt --output neighbors
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.eval.provenance.artifacts import save_figure, write_json
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.reporting.drawing import COLORS, new_figure, require_matplotlib
from kvcache_compress.eval.runner.command import DeviceOption, DtypeOption, SeedOption
from kvcache_compress.eval.runner.progress import ProgressLine

from .embeddings import EmbeddingsOption, HiddenLayerOption, SourceModelOption, SourceTextOption, embeddings_from
from .indexes import CENTROIDS, TURBOQUANTS, builders, require_faiss

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Values of k in recall 1@k."""


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
    on_progress: Callable[[int, int, str], None] | None = None,
) -> list[NeighborRow]:
    """Measure every index at every bit width.

    Args:
        base: unit vectors `[N, d]`, at least 256.
        queries: unit vectors `[M, d]`.
        bits: 1, 2 or 4.
        seed: of all random rotations.
        repeats: runs that times are medians of.
        threads: CPU threads of torch and faiss.
        on_progress: called with indexes done, indexes in all, and the next one's label.

    Raises:
        ValueError: sizes that are not allowed.
        ImportError: faiss is not installed.
    """
    if len(base) < CENTROIDS:
        raise ValueError(f"base of {len(base)} vectors: allowed at least {CENTROIDS}, one per centroid")
    for name, value in {"repeats": repeats, "threads": threads}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: allowed at least 1")
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
                if on_progress is not None:
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
            rows.append(NeighborRow(name, number, index.bits, index.shared_bytes(), recall(ranked, products), *medians))
    if on_progress is not None:
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


def markdown_table(rows: Sequence[NeighborRow]) -> str:
    """Markdown table with a line per index."""
    shown = [k for k in COUNTS if k in (1, 2, 4, 8, 64)]
    heads = [
        "index",
        "bits",
        "bits stored",
        "shared KiB",
        *(f"1@{k}" for k in shown),
        "setup, s",
        "indexing, s",
        "search, s",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        recalls = [f"{row.recall[k]:.3f}" for k in shown]
        sizes = [str(row.bits), f"{row.stored_bits:.2f}", f"{row.shared_bytes / 1024:.0f}"]
        times = [f"{seconds:.3f}" for seconds in (row.setup_seconds, row.index_seconds, row.search_seconds)]
        lines.append(f"| {' | '.join([row.method, *sizes, *recalls, *times])} |")
    return "\n".join(lines) + "\n"


def plot_neighbors(rows: Sequence[NeighborRow], path: Path) -> None:
    """Plot recall by k for each bit width, and indexing times."""
    widths, names = sorted({row.bits for row in rows}), list(dict.fromkeys(row.method for row in rows))
    figure, _ = new_figure(4.4 * (len(widths) + 1), 4.6, axes=False)
    panels = figure.subplots(1, len(widths) + 1, squeeze=False)[0]
    lowest = min(row.recall[COUNTS[0]] for row in rows)
    for panel, width in zip(panels, widths, strict=False):
        for row in (row for row in rows if row.bits == width):
            order = names.index(row.method)
            look = {"color": COLORS[order], "marker": "osd^vP"[order], "markersize": 5, "alpha": 0.85}
            look["linestyle"] = "-" if row.method in TURBOQUANTS else "--"
            panel.plot(list(row.recall), list(row.recall.values()), label=row.method, **look)
        panel.set_xscale("log", base=2)
        panel.set_xticks(COUNTS, [str(k) for k in COUNTS])
        panel.set(xlabel="k", ylabel="recall 1@k", title=f"{width} bits", ylim=(lowest - 0.03, 1.01))
        panel.grid(alpha=0.3)
    times = panels[-1]
    height = 0.8 / len(widths)
    for order, name in enumerate(names):
        for row in (row for row in rows if row.method == name):
            place = order + (widths.index(row.bits) - (len(widths) - 1) / 2) * height
            times.barh(place, row.index_seconds, height * 0.9, color=COLORS[order])
            label = f" {row.bits} bits ({row.stored_bits:.2f} stored): {row.index_seconds:.3g} s"
            times.annotate(label, (row.index_seconds, place), va="center", fontsize=8)
    times.set(xscale="log", xlabel="seconds", title="indexing time", yticks=[])
    times.invert_yaxis()
    times.set_xlim(right=max(row.index_seconds for row in rows) * 300)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    save_figure(figure, path)


def main(
    output: Annotated[Path, typer.Option(help="Folder for neighbors.json, neighbors.md and neighbors.png.")],
    embeddings: EmbeddingsOption = None,
    model: SourceModelOption = None,
    text: SourceTextOption = None,
    layer: HiddenLayerOption = -1,
    bits: Annotated[list[int], typer.Option(help="Bits per number: 1, 2 or 4. Repeatable.")] = [2, 4],  # noqa: B006
    base: Annotated[int, typer.Option(help="Vectors to search.", min=1)] = 12_000,
    queries: Annotated[int, typer.Option(help="Vectors to find the nearest neighbours of.", min=1)] = 500,
    repeats: Annotated[int, typer.Option(help="Runs that times are medians of.", max=10_000)] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads of torch and faiss.", max=1024)] = 1,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Measure recall and indexing time of TurboQuant, product quantization and RaBitQ on real embeddings."""
    output.mkdir(parents=True, exist_ok=True)
    require_matplotlib()  # a missing package shows before the work, not after it
    require_faiss()
    source: dict[str, Any] = {"layer": layer, "tokens": base + queries, "dtype": dtype, "device": device}
    loaded = embeddings_from(embeddings, model, text, **source, on_progress=ProgressLine())
    vectors, query_vectors = loaded.split(base, queries, seed)
    options: dict[str, Any] = {"seed": seed, "repeats": repeats, "threads": threads}
    rows = measure_neighbors(vectors, query_vectors, bits, **options, on_progress=ProgressLine())
    fields = {"source": loaded.source, "dim": vectors.shape[1], "base": base, "queries": queries, **options}
    fields["rows"] = [asdict(row) for row in rows]
    write_json(output / "neighbors.json", fields, torch.device("cpu"), "faiss-cpu", "matplotlib")
    write_atomically(output / "neighbors.md", markdown_table(rows))
    plot_neighbors(rows, output / "neighbors.png")
    typer.echo(markdown_table(rows))
