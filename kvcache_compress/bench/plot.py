"""A plot of measured decode attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcache_compress.eval.reporting.drawing import COLORS, MARKERS, THEME, new_figure, save_figure, style
from kvcache_compress.validation import shortened

from .decode import DecodeTime


def decode_plot(rows: Sequence[DecodeTime], title: str, path: Path) -> None:
    """Plot milliseconds against tokens on logarithmic axes as PNG: a panel per batch size, a line per cache.

    Rows without a time are skipped; at least one must have a time.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    timed = [row for row in rows if row.milliseconds is not None]
    batches = sorted({row.batch for row in timed})
    lengths = sorted({row.tokens for row in timed})
    caches = list(dict.fromkeys(row.cache for row in timed))
    compressed = [name for name in caches if name != "full"]
    looks = {name: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)], "-") for i, name in enumerate(compressed)}
    looks["full"] = (THEME["ink"], "*", "--")
    with style():
        figure = new_figure(1.6 + 3.6 * len(batches), 4.4)
        panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for ax, batch in zip(panels, batches, strict=True):
            for name in caches:
                mine = sorted((row for row in timed if (row.cache, row.batch) == (name, batch)), key=lambda r: r.tokens)
                points = [(row.tokens, row.milliseconds) for row in mine]
                color, marker, line = looks[name]
                if points:
                    ax.plot(*zip(*points, strict=True), color=color, marker=marker, ls=line, lw=1.2, ms=5, label=name)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.xaxis.set_major_locator(FixedLocator(lengths))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:,.0f}"))
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.set_xlabel("tokens in the cache")
            ax.set_title(f"batch {batch}", fontsize=9)
        panels[0].set_ylabel("milliseconds per step")
        figure.suptitle(shortened(title, 80), fontsize=10)
        handles = {label: line for ax in panels for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        names = [shortened(name, 26) for name in handles]
        figure.legend(handles.values(), names, loc="outside lower center", ncols=2 if len(batches) == 1 else 4)
        save_figure(figure, path)
