"""Plot of a comparison: bits against loss."""

import warnings
from pathlib import Path
from typing import Any

from kvcache_compress.files.atomic import whole_file
from kvcache_compress.validation import shortened

from .tables import FULL_BITS, Column, Row, Table

# The first six are Okabe and Ito's, which can be told apart with any colour vision; yellow and black are left out.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f8890", "#8766b8")
SETTINGS = {"text.parse_math": False, "font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.5}
"""Without mathematics, `$` in a name is no formula."""
MARKERS = "os^DvPXph<>"
NAME = 26
"""Characters of a cache's name that a plot has room for."""


def plot_pareto(table: Table, column: Column, path: Path) -> bool:
    """Plot the loss in a benchmark against packed bits, a colour per method; False if there is nothing to plot.

    Caches on the Pareto front have a rim and a name.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    points: dict[str, list[tuple[Row, float, float]]] = {}
    for row in table.rows:
        if not row.lossless and (loss := table.loss(row, column)) is not None:
            points.setdefault(row.family, []).append((row, row.cells[column.name].packed_bits or FULL_BITS, loss))
    if not points:
        return False
    front = table.front(column)
    with rc_context(SETTINGS), warnings.catch_warnings(), whole_file(path) as unfinished:
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(6.4, 4.8), layout="constrained")
        ax = figure.add_subplot()
        for number, (family, of_family) in enumerate(sorted(points.items())):
            rims = ["black" if row in front else "none" for row, _, _ in of_family]
            look: dict[str, Any] = {"c": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
            ax.scatter(*zip(*(point[1:] for point in of_family), strict=True), label=family, edgecolors=rims, **look)
            for row, bits, loss in of_family:
                if row in front:
                    name = shortened(row.cache, NAME)
                    ax.annotate(name, (bits, loss), (4, 4), textcoords="offset points", fontsize=7)
        if (bound := table.bound(column)) is not None:
            ax.axhline(bound, color="gray", lw=1, ls="--", label=f"a loss of {bound:.3g}")
        ax.set_xscale("log", base=2)
        low, high = ax.get_xlim()
        ax.set_xticks([tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 16) if 0.8 * low <= tick <= 1.25 * high])
        ax.xaxis.set_minor_formatter(NullFormatter())
        if all(loss > 0 for of_family in points.values() for _, _, loss in of_family):
            ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        ax.set(xlabel="measured bits per number, packed part")
        ax.set_ylabel(f"{column.name}: {column.label}" + (", loss" if column.higher_is_better else ""))
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.savefig(unfinished, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return True
