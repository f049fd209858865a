"""`kvcache-compress eval` `probe`, `distortion` and `neighbors`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvcache_compress.config import load_config
from kvcache_compress.eval.caches.prefill import STEP_TOKENS
from kvcache_compress.eval.provenance.artifacts import write_json
from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.reporting.drawing import require_matplotlib
from kvcache_compress.eval.runner.load import load
from kvcache_compress.eval.runner.progress import ProgressLine
from kvcache_compress.eval.studies.distortion import measure_distortion, plot_distortion
from kvcache_compress.eval.studies.layers import Probe, plot_probe, probe_layers
from kvcache_compress.eval.studies.neighbors import measure_neighbors, neighbors_table, plot_neighbors, require_faiss
from kvcache_compress.eval.studies.vectors import embeddings_from
from kvcache_compress.eval.tasks.perplexity import DEFAULT_TEXT, Perplexity

from .options import (
    DEFAULT_MODEL,
    CodebooksOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    SeedOption,
    StatisticsOption,
)

EmbeddingsOption = Annotated[
    Path | None, typer.Option(help="A .npy file of vectors, [N, d]; instead of --model and --text.")
]
SourceModelOption = Annotated[
    str | None, typer.Option(help="Model whose hidden states are the vectors: smollm2-135m, a hub id or a folder.")
]
SourceTextOption = Annotated[Path | None, typer.Option(help="Text file that the model reads.")]
HiddenLayerOption = Annotated[
    int, typer.Option(help="Hidden states after this layer; 0 is the input, -1 after the final norm.")
]


def probe(
    cache: Annotated[str, typer.Option(help="Preset or YAML file.")] = "turboquant-2bit",
    model: ModelOption = DEFAULT_MODEL,
    text: Annotated[Path, typer.Option(help="Text file, or folder of .txt files.")] = DEFAULT_TEXT,
    windows: Annotated[int, typer.Option(help="Windows of prefix + scored tokens.")] = 2,
    prefix: Annotated[int, typer.Option(help="Tokens to prefill.")] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens to score after them.")] = 256,
    step: Annotated[int, typer.Option(help="Scored tokens per forward pass; 1 is as in generation.")] = STEP_TOKENS,
    sink_tokens: Annotated[int | None, typer.Option(min=0, help="Sink tokens, instead of the preset's.")] = None,
    recent_tokens: Annotated[int | None, typer.Option(min=0, help="Recent tokens, instead of the preset's.")] = None,
    worst: Annotated[int, typer.Option(help="Sides of layers that the rules leave uncompressed.")] = 4,
    codebooks: CodebooksOption = None,
    statistics: StatisticsOption = None,
    output: Annotated[Path | None, typer.Option(help="Folder for probe.json and probe.png.", file_okay=False)] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Find the layers and sides (keys or values) whose compression alone hurts the model's output most."""
    if output is not None:
        require_matplotlib()  # a missing matplotlib shows before the work, not after it
    ends = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    config = load_config(cache).changed(**{name: n for name, n in ends.items() if n is not None})
    config = config.with_files(codebooks=codebooks, statistics=statistics)
    sizes = {"prefix": prefix, "scored": scored, "windows": windows, "step": step}
    benchmark = Perplexity(texts=(text,), **sizes)
    loaded, tokenizer = load(model, dtype, device)
    found = probe_layers(loaded, tokenizer, config, benchmark, worst=worst, on_progress=ProgressLine())
    name = Path(loaded.name_or_path or type(loaded).__name__).name
    title = f"{cache}: {name}, {'/'.join(text.resolve().parts[-2:])}, {windows} x ({prefix} + {scored}) tokens"
    if output is not None:
        about = {"model": name, "dtype": dtype, "cache": cache, "config": config.model_dump(mode="json"), **sizes}
        write_json(output / "probe.json", about | asdict(found), loaded.device, "matplotlib")
        plot_probe(found, title, output / "probe.png")
    Console(width=140).print(_probe_table(found, title))
    for what, why in found.skipped.items():
        typer.echo(f"{what}: {why}")
    for label, harm in {"all sides": found.whole, f"without the worst {worst}": found.ruled}.items():
        typer.echo(f"{label}: KL {harm.kl:.5f}, {harm.all_bits:.2f} bits per number over the whole cache")
    typer.echo(found.advice)


def _probe_table(found: Probe, title: str) -> Table:
    """A line per side of a layer, the most harmful first."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "side", "method"):
        table.add_column(heading)
    for heading in ("bits", "KL", "same top-1", "rel. MSE", "attention error", "packed tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        spread = "" if row.kl_stderr is None else f" ± {row.kl_stderr:.6f}"
        errors = ("-" if error is None else f"{error:.4f}" for error in (row.relative_mse, row.attention_error))
        figures = f"{row.stored_bits:.2f}", f"{row.kl:.6f}{spread}", f"{row.top1:.3f}", *errors
        table.add_row(str(row.layer), row.side, row.method, *figures, f"{row.packed_tokens:.0f}")
    return table


def distortion(
    output: Annotated[Path, typer.Option(help="Folder for distortion.json and distortion.png.", file_okay=False)],
    embeddings: EmbeddingsOption = None,
    model: SourceModelOption = None,
    text: SourceTextOption = None,
    layer: HiddenLayerOption = -1,
    bits: Annotated[list[int], typer.Option(help="Bits per number, 1 to 6. Repeatable.")] = [1, 2, 3, 4],  # noqa: B006
    base: Annotated[int, typer.Option(help="Vectors to compress.")] = 4096,
    queries: Annotated[int, typer.Option(help="Vectors to multiply them with.")] = 256,
    rotations: Annotated[int, typer.Option(help="Random rotations to average over.", max=10_000)] = 4,
    seed: SeedOption = 0,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
) -> None:
    """Measure errors and biases of TurboQuant's estimators on real embeddings, with the bounds of its theory."""
    require_matplotlib()
    source: dict[str, Any] = {"layer": layer, "tokens": base + queries, "dtype": dtype, "device": device}
    loaded = embeddings_from(embeddings, model, text, **source, on_progress=ProgressLine())
    vectors, query_vectors = loaded.split(base, queries, seed)
    rows = measure_distortion(vectors, query_vectors, bits, seeds=rotations, on_progress=ProgressLine())
    sizes = {"dim": vectors.shape[1], "base": base, "queries": queries, "rotations": rotations, "seed": seed}
    fields = {"source": loaded.source, **sizes, "rows": [asdict(row) for row in rows]}
    write_json(output / "distortion.json", fields, torch.device("cpu"), "matplotlib")
    plot_distortion(rows, output / "distortion.png")
    for row in rows:
        typer.echo(
            f"{row.estimator:26}{row.bits} bits ({row.stored_bits:.2f} stored)  MSE {row.mse:.4f}  "
            f"product {row.product_error:.4f}  bias {row.bias:+.5f}"
        )


def neighbors(
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
    require_matplotlib()
    require_faiss()
    source: dict[str, Any] = {"layer": layer, "tokens": base + queries, "dtype": dtype, "device": device}
    loaded = embeddings_from(embeddings, model, text, **source, on_progress=ProgressLine())
    vectors, query_vectors = loaded.split(base, queries, seed)
    options: dict[str, Any] = {"seed": seed, "repeats": repeats, "threads": threads}
    rows = measure_neighbors(vectors, query_vectors, bits, **options, on_progress=ProgressLine())
    fields = {"source": loaded.source, "dim": vectors.shape[1], "base": base, "queries": queries, **options}
    fields["rows"] = [asdict(row) for row in rows]
    write_json(output / "neighbors.json", fields, torch.device("cpu"), "faiss-cpu", "matplotlib")
    write_atomically(output / "neighbors.md", neighbors_table(rows))
    plot_neighbors(rows, output / "neighbors.png")
    typer.echo(neighbors_table(rows))
