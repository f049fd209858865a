"""Plots of a comparison: bits against loss, memory against prompt length, heat maps of needles."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache_compress.eval.runner.cells import cell_path

from .answer import bound, recommended, shortlist
from .drawing import COLORS, MARKERS, THEME, Label, Plot, new_figure, place_labels, require_matplotlib, shortened, style
from .table_parts import Column, Point, Row
from .tables import Bits, Table

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Grid = dict[tuple[float, float], float]
"""Mean score by length and depth."""

SIZE = 4.8, 4.5
"""Inches; small, so that text is legible where a page is narrow."""

SCALE = "viridis"
"""Colour map of the heat maps: even steps of lightness, for any colour vision."""


def draw(table: Table) -> list[Plot]:
    """Draw all plots that a table has data for, the most telling first.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    needles = [needle_plot(table, column) for column in table.columns if needle_grids(table, column)]
    return [*pareto_plots(table), *memory_plots(table), *needles]


def pareto_plots(table: Table) -> list[Plot]:
    """Plots of packed bits against loss for each benchmark, and of the whole cache's bits for the leading one."""
    kinds: list[tuple[Column, Bits]] = [(table.columns[0], "packed_bits"), (table.columns[0], "all_bits")]
    kinds += [(column, "packed_bits") for column in table.columns[1:]]
    return [pareto(table, column, bits) for column, bits in kinds if table.points(column, bits)]


def pareto(table: Table, column: Column, bits: Bits) -> Plot:
    """Plot measured bits against KL or the difference in score.

    Caches on the Pareto front and those of the report's first table have their name, others where there is room.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    points = table.points(column, bits)
    front = [point for point in points if point.on_front]
    styles = family_styles(table)
    part = "packed part" if bits == "packed_bits" else "whole cache"
    tips = {f"point-{p.row.number}": _point_text(p, column) for p in points}
    named = {row.number for row in shortlist(table)}
    with style():
        figure, ax = new_figure(*SIZE)
        ax.set_xscale("log", base=2)
        _value_axis(ax, table, column, [point.value for point in points])
        stairs = [(front[0].bits, front[0].value)]
        for point in front[1:]:
            stairs += [(point.bits, stairs[-1][1]), (point.bits, point.value)]
        ax.plot(*zip(*stairs, strict=True), lw=1, ls="--", color=THEME["muted"])
        for point in points:
            color, marker = styles[point.row.family]
            look = {"ms": 7, "mec": THEME["ink"], "mew": 1.2} if point.on_front else {"ms": 5, "mew": 0, "alpha": 0.8}
            gid = f"point-{point.row.number}"
            ax.plot([point.bits], [point.value], marker, color=color, gid=gid, zorder=3, **look)
        low, high = points[0].bits, points[-1].bits
        ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32) if low / 1.25 <= tick <= high * 1.25]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        ax.set_xlim(low / 1.25, high * 1.25)
        ax.set_xlabel(f"measured bits per number, {part}")
        ax.set_ylabel(shortened(_value_name(table, column), 60))
        ax.margins(y=0.1)
        shade = _shade_losses(ax, column, bound(table, column) if column is table.columns[0] else None)
        _family_legend(figure, {point.row.family for point in points}, styles, shade)
        place_labels(
            figure,
            ax,
            [
                Label(p.bits, p.value, shortened(p.row.cache), needed=p.on_front or p.row.number in named)
                for p in points
            ],
            line=stairs,
            upwards=column.higher_is_better,
        )
    title = f"Bits of the {part} against {column.label} of {column.name}"
    alt = f"{title}, {len(points)} caches. On the front: {'; '.join(_point_text(p, column) for p in front)}."
    subject = column.name if bits == "packed_bits" else f"the {part}"
    return Plot("pareto", _slug(table, column.name, bits), alt, figure, tips, title, subject)


def memory_plots(table: Table) -> list[Plot]:
    """The plot of `memory`, unless all prompts have one length."""
    curves = memory_curves(table)
    lengths = {tokens for curve in curves.values() for tokens in curve}
    return [memory(table, curves)] if len(lengths) > 1 else []


def memory_curves(table: Table) -> dict[int, dict[int, float]]:
    """Bytes of the whole cache (dense tokens as 16 bits, mean over equal prompts) by row number and prompt tokens."""
    curves = {}
    for row in table.rows:
        sizes: dict[int, list[float]] = {}
        for cell in row.cells.values():
            for record in cell.records:
                sizes.setdefault(record["tokens"], []).append(record["total_bytes"])
        if sizes:
            curves[row.number] = {tokens: statistics.fmean(sizes[tokens]) for tokens in sorted(sizes)}
    return curves


def memory(table: Table, curves: Mapping[int, Mapping[int, float]]) -> Plot:
    """Plot measured bytes against prompt tokens for the caches of the report's first table, labelled by name."""
    styles = family_styles(table)
    rows = [row for row in shortlist(table) if row.number in curves]
    chosen = {point.row.number for _, point in recommended(table, "packed_bits")}
    tips, ends = {}, {}
    with style():
        figure, ax = new_figure(*SIZE)
        for row in rows:
            tokens, sizes = list(curves[row.number]), [size / 2**20 for size in curves[row.number].values()]
            color, marker = styles[row.family]
            look = {"lw": 1.8, "zorder": 3} if row.lossless or row.number in chosen else {"lw": 0.8}
            gid = f"line-{row.number}"
            ls = "--" if row.lossless else "-"
            ax.plot(tokens, sizes, color=color, marker=marker, ms=4, markevery=[0, -1], gid=gid, ls=ls, **look)
            tips[gid] = f"{row.cache}: {sizes[-1]:.1f} MiB at {tokens[-1]} tokens"
            ends[shortened(row.cache, 24)] = sizes[-1]
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("prompt tokens")
        ax.set_ylabel("whole cache beside a 16-bit model, MiB")
        _end_labels(ax, ends)
        _family_legend(figure, {row.family for row in rows}, styles)
    title = "Memory of the whole cache against prompt length"
    alt = f"{title}. {'; '.join(tips.values())}."
    return Plot("memory", _slug(table, "memory"), alt, figure, tips, title)


def needle_grids(table: Table, column: Column) -> list[tuple[Row, Grid]]:
    """Mean score by length and depth of each cache that has finished the benchmark."""
    grids: list[tuple[Row, Grid]] = []
    for row in table.rows if column.kind == "needle" else ():
        cell = row.cells.get(column.name)
        scores: dict[tuple[float, float], list[float]] = {}
        for record in cell.records if cell is not None and cell.error is None else ():
            scores.setdefault((record["length"], record["depth"]), []).append(record["score"])
        if scores:
            grids.append((row, {place: statistics.fmean(of_place) for place, of_place in scores.items()}))
    return grids


def needle_scale(grids: Sequence[tuple[Row, Grid]]) -> float:
    """Upper end of the common scale: 1 if it holds all scores, else 100."""
    return 1.0 if all(score <= 1 for _, grid in grids for score in grid.values()) else 100.0


def needle_plot(table: Table, column: Column) -> Plot:
    """Plot a small heat map per cache, all on one scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    grids = needle_grids(table, column)
    top = needle_scale(grids)
    width = min(5, len(grids))
    height = -(-len(grids) // width)
    with style():
        figure, _ = new_figure(2.1 * width + 0.6, 1.75 * height + 0.5, axes=False)
        axes = figure.subplots(height, width, squeeze=False)
        for ax in axes.flat[len(grids) :]:
            ax.remove()
        for ax, (row, grid) in zip(axes.flat, grids, strict=False):
            _heat_map(ax, grid, top)
            ax.set_title(shortened(row.cache), fontsize=8)
        figure.supxlabel("prompt length, tokens", fontsize=9)
        figure.supylabel("depth of the needle", fontsize=9)
        colors = ScalarMappable(Normalize(0, top), SCALE)
        figure.colorbar(colors, ax=figure.axes, label="score", shrink=min(1, 3 / height), aspect=30)
    title = f"Score in {column.name} by prompt length and depth of the needle"
    means = (f"{row.cache}: {column.text(statistics.fmean(grid.values()))}" for row, grid in grids)
    return Plot("needle", _slug(table, column.name, "heat maps"), f"{title}. {'; '.join(means)}.", figure, title=title)


def scale_color(share: float) -> tuple[str, str]:
    """Colour of a share from 0 to 1 in the heat maps, and the colour of text on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    red, green, blue, _ = colormaps[SCALE](share)
    return to_hex((red, green, blue)), "#000" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "#fff"


def family_styles(table: Table) -> dict[str, tuple[str, str]]:
    """Colour and marker of each family; the same for all plots of a table."""
    families = sorted({row.family for row in table.rows if not row.lossless})
    styles = {name: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(families)}
    return {**styles, "full": (THEME["ink"], "*")}


def _heat_map(ax: Axes, grid: Grid, top: float) -> None:
    lengths, depths = (sorted({place[axis] for place in grid}) for axis in (0, 1))
    values = [[grid.get((length, depth), float("nan")) for length in lengths] for depth in depths]
    ax.pcolormesh(values, vmin=0, vmax=top, cmap=SCALE, edgecolor="face", linewidth=0.2)
    ax.grid(False)
    ax.invert_yaxis()
    for axis, ticks in ((ax.xaxis, lengths), (ax.yaxis, depths)):
        places = sorted({0, len(ticks) // 2, len(ticks) - 1}) if len(ticks) > 3 else range(len(ticks))
        axis.set_ticks([place + 0.5 for place in places], [f"{ticks[place]:g}" for place in places])
        axis.set_tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)


def _value_axis(ax: Axes, table: Table, column: Column, values: Sequence[float]) -> None:
    """Set the axis of values: logarithmic for KL and (beyond their median) differences, linear for plain scores."""
    from matplotlib.ticker import FuncFormatter

    sizes = [abs(value) for value in values if value]
    if not column.higher_is_better and len(sizes) == len(values) and min(values) > 0:
        ax.set_yscale("log")
    elif sizes and (_is_difference(table, column) or not column.higher_is_better):
        ax.set_yscale("symlog", linthresh=statistics.median(sizes) if column.higher_is_better else min(sizes))
        ax.axhline(0, color=THEME["muted"], lw=1, ls=":")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}".replace("-", "−")))


def _end_labels(ax: Axes, ends: Mapping[str, float]) -> None:
    """Write names right of the axes, at the height of their lines' ends, at least a line of text apart."""
    line = 0.05 * ax.get_ylim()[1]
    lowest = -line
    for text, y in sorted(ends.items(), key=lambda end: end[1]):
        lowest = max(y, lowest + line)
        ax.annotate(
            text,
            (1, y),
            (1.05, lowest),
            xycoords=ax.get_yaxis_transform(),
            textcoords=ax.get_yaxis_transform(),
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": THEME["muted"], "lw": 0.5, "shrinkA": 1, "shrinkB": 0},
        )


def _shade_losses(ax: Axes, column: Column, most: float | None) -> list[Artist]:
    """Shade losses above the recommended bound, as far as the axis shows them."""
    low, high = ax.set_ylim(ax.get_ylim())
    if most is None or not (low < most if column.higher_is_better else most < high):
        return []
    ends, side = ((low, min(most, high)), "below") if column.higher_is_better else ((max(most, low), high), "above")
    label = f"{side} {most:.3g}: not recommended".replace("-", "−")
    return [ax.axhspan(*ends, color=THEME["muted"], alpha=0.12, lw=0, zorder=0, label=label)]


def _family_legend(
    figure: Figure, families: set[str], styles: Mapping[str, tuple[str, str]], more: Sequence[Artist] = ()
) -> None:
    from matplotlib.lines import Line2D

    looks = {shortened(name, 20): styles[name] for name in sorted(families)}
    entries = [Line2D([], [], color=color, marker=marker, ls="", label=name) for name, (color, marker) in looks.items()]
    figure.legend(handles=[*entries, *more], loc="outside lower center", ncols=3, handletextpad=0.2, columnspacing=1)


def _value_name(table: Table, column: Column) -> str:
    """Name of the values of `Table.points`."""
    if not column.higher_is_better:
        return f"{column.name}: {column.label} (lower is better)"
    against = " minus full cache" if _is_difference(table, column) else ""
    return f"{column.name}: {column.label}{against} (higher is better)"


def _is_difference(table: Table, column: Column) -> bool:
    """True if the values of `Table.points` are differences from the full cache."""
    return column.higher_is_better and table.full is not None and table.full.score(column) is not None


def _point_text(point: Point, column: Column) -> str:
    value = column.difference_text(point.value) if column.higher_is_better else column.text(point.value)
    return f"{point.row.cache}: {point.bits:.2f} bits, {value}"


def _slug(table: Table, *parts: str) -> str:
    """A name for files and ids."""
    words = "-".join((cell_path(Path(), table.model, table.dtype, "-".join(parts)).with_suffix("")).parts)
    return re.sub(r"[^\w-]+", "-", words)
