"""Distortion of TurboQuant against its theory, on real embeddings (TurboQuant, section 4.1).

For base vectors x and queries y on the unit sphere, each estimator decodes x to x̃ with several random rotations. The
error of a pair is ⟨x̃, y⟩ - ⟨x, y⟩; its mean is the bias. Squared errors of inner products are given times d, so that
they compare across dimensions. Bounds (Theorems 1 to 3): 4^-b to √3π/2 · 4^-b on the mean squared error of x,
4^-b to √3π² · 4^-b on d times that of its inner product with any one y, in expectation over the rotation.

    kvcache-compress eval distortion --model smollm2-135m --text TEXT.txt --output distortion
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_compress.eval.provenance.artifacts import save_figure, write_json
from kvcache_compress.eval.reporting.drawing import COLORS, new_figure, require_matplotlib
from kvcache_compress.eval.runner.command import DeviceOption, DtypeOption, SeedOption
from kvcache_compress.eval.runner.progress import ProgressLine

from .distortion_measures import ESTIMATORS, MSE_BOUNDS, PRODUCT_BOUNDS, Distortion, measure_embeddings
from .embeddings import EmbeddingsOption, HiddenLayerOption, SourceModelOption, SourceTextOption, embeddings_from


def plot_histograms(rows: Sequence[Distortion], dim: int, path: Path) -> None:
    """The paper's Figure 1: a row of panels per estimator, a column per bit width."""
    names, widths = list(dict.fromkeys(row.estimator for row in rows)), sorted({row.bits for row in rows})
    figure, _ = new_figure(2.9 * len(widths) + 0.8, 1.9 * len(names) + 0.6, axes=False)
    panels = figure.subplots(len(names), len(widths), squeeze=False, sharex="col")
    for row in rows:
        line = names.index(row.estimator)
        panel = panels[line][widths.index(row.bits)]
        panel.stairs(row.density, _edges(row).tolist(), fill=True, color=COLORS[line], alpha=0.75)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.axvline(row.bias, color="black", linewidth=1, linestyle="--")
        panel.set_title(f"{row.estimator}: {row.bits} bit{'s' * (row.bits > 1)}", fontsize=9)
        panel.annotate(f"bias {row.bias:+.4f}", (0.97, 0.9), xycoords="axes fraction", ha="right", va="top", fontsize=8)
        panel.set_yticks([])
        panel.tick_params(labelsize=8)
    for column, width in enumerate(widths):
        selected = [row for row in rows if row.bits == width]
        reach = max(abs(row.bias) + 4 * _spread(row, dim) for row in selected)
        panels[0][column].set_xlim(-reach, reach)
    figure.supxlabel("error of the inner product (dashed: its mean)", fontsize=10)
    save_figure(figure, path)


def _edges(row: Distortion) -> torch.Tensor:
    return torch.linspace(row.least, row.greatest, len(row.density) + 1)


def _spread(row: Distortion, dim: int) -> float:
    """Standard deviation of the errors."""
    return math.sqrt(row.product_error / dim - row.bias**2)


def plot_bias(rows: Sequence[Distortion], path: Path) -> None:
    """The paper's Figure 2: bias by bits; bias and spread by the inner product, at the width nearest to 2 bits."""
    names = list(dict.fromkeys(row.estimator for row in rows))
    shown = min({row.bits for row in rows}, key=lambda bits: (abs(bits - 2), bits))
    figure, _ = new_figure(13, 4.2, axes=False)
    by_bits, bias, spread = figure.subplots(1, 3)
    for name, color, marker in zip(names, COLORS, "osd^", strict=False):
        selected = sorted((row for row in rows if row.estimator == name), key=lambda row: row.bits)
        style: dict[str, Any] = {"label": name, "color": color, "marker": marker, "markersize": 5}
        by_bits.plot([row.bits for row in selected], [row.bias for row in selected], **style)
        bins = next(row.by_product for row in selected if row.bits == shown)
        bias.plot([one.product for one in bins], [one.bias for one in bins], **style)
        spread.plot([one.product for one in bins], [one.std for one in bins], **style)
    by_bits.set(xlabel="bits", ylabel="mean error of the inner product", title="bias against bits")
    by_bits.set_xticks(sorted({row.bits for row in rows}))
    bias.set(xlabel="true inner product", ylabel="mean error", title=f"bias against the inner product, {shown} bits")
    spread.set(xlabel="true inner product", ylabel="standard deviation", title=f"spread, {shown} bits")
    spread.set_ylim(bottom=0)
    for panel in (by_bits, bias):
        panel.axhline(0, color="black", linewidth=0.8)
    figure.legend(*by_bits.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    save_figure(figure, path)


def plot_curves(rows: Sequence[Distortion], path: Path) -> None:
    """The paper's Figure 3: errors by bits between the lower and the upper bound."""
    figure, _ = new_figure(10.5, 4.6, axes=False)
    panels = figure.subplots(1, 2)
    widths = sorted({row.bits for row in rows})
    titles = (
        "inner product: squared error times d (bounds: prod)",
        "mean squared error of a unit vector (bounds: mse)",
    )
    for panel, title, bounds in zip(panels, titles, (PRODUCT_BOUNDS, MSE_BOUNDS), strict=True):
        for bound, label, line in zip(bounds, ("lower bound", "upper bound"), (":", "--"), strict=True):
            panel.plot(widths, [bound * 4.0**-bits for bits in widths], color="black", linestyle=line, label=label)
        for name, color, marker in zip(ESTIMATORS, COLORS, "osd^", strict=False):
            selected = sorted((row for row in rows if row.estimator == name), key=lambda row: row.bits)
            heights = [row.product_error if panel is panels[0] else row.mse for row in selected]
            panel.plot([row.bits for row in selected], heights, label=name, color=color, marker=marker, markersize=5)
        panel.set(xlabel="bits", title=title, yscale="log")
        panel.set_xticks(widths)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    save_figure(figure, path)


def main(
    output: Annotated[Path, typer.Option(help="Folder for distortion.json and three PNG files.", file_okay=False)],
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
    output.mkdir(parents=True, exist_ok=True)
    require_matplotlib()  # a missing matplotlib shows before the work, not after it
    source: dict[str, Any] = {"layer": layer, "tokens": base + queries, "dtype": dtype, "device": device}
    loaded = embeddings_from(embeddings, model, text, **source, on_progress=ProgressLine())
    vectors, query_vectors = loaded.split(base, queries, seed)
    rows = measure_embeddings(vectors, query_vectors, bits, seeds=rotations, on_progress=ProgressLine())
    dim = vectors.shape[1]
    sizes = {"dim": dim, "base": base, "queries": queries, "rotations": rotations, "seed": seed}
    fields = {"source": loaded.source, **sizes, "rows": [asdict(row) for row in rows]}
    write_json(output / "distortion.json", fields, torch.device("cpu"), "matplotlib")
    plot_histograms(rows, dim, output / "histograms.png")
    plot_bias(rows, output / "bias.png")
    plot_curves(rows, output / "curves.png")
    for row in rows:
        typer.echo(
            f"{row.estimator:26}{row.bits} bits ({row.stored_bits:.2f} stored)  MSE {row.mse:.4f}  "
            f"product {row.product_error:.4f}  bias {row.bias:+.5f}"
        )
