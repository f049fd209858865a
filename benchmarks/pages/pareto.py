"""Plot of a comparison: bits against loss."""

import math
from pathlib import Path
from typing import Any

from losses import cells_of
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from tables import Row, Table

from kvcache_compress.files.atomic import whole_file

# The first six are Okabe and Ito's, which can be told apart with any colour vision; yellow and black are left out.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f8890", "#8766b8")
SETTINGS = {"font.size": 9, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.5}
MARKERS = "os^DvPXph<>"
MAX_KL = 0.02
"""Largest KL of a cache that is recommended, in nats per token: about 2 % more perplexity."""


def plot_pareto(table: Table, benchmark: str, path: Path) -> None:
    """Plot the KL in a benchmark against packed bits, a colour per method.

    Caches that no other beats in both have a rim and a name.
    """
    cells = cells_of(table, benchmark)
    points: dict[str, list[tuple[Row, float, float]]] = {}
    for row in table.rows:
        if not row.lossless:
            cell = cells[row.cache]
            points.setdefault(row.family, []).append((row, cell.packed_bits or math.nan, cell.scores["kl"]))
    front, least = [], math.inf
    for row, _, kl in sorted((point for each in points.values() for point in each), key=lambda point: point[1:]):
        if kl < least:
            front.append(row)
            least = kl
    with rc_context(SETTINGS), whole_file(path) as unfinished:
        figure = Figure(figsize=(6.4, 4.8), layout="constrained")
        ax = figure.add_subplot()
        for number, (family, of_family) in enumerate(sorted(points.items())):
            rims = ["black" if row in front else "none" for row, _, _ in of_family]
            look: dict[str, Any] = {"c": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
            ax.scatter(*zip(*(point[1:] for point in of_family), strict=True), label=family, edgecolors=rims, **look)
            for row, bits, kl in of_family:
                if row in front:
                    ax.annotate(row.cache, (bits, kl), (4, 4), textcoords="offset points", fontsize=7)
        ax.axhline(MAX_KL, color="gray", lw=1, ls="--", label=f"a loss of {MAX_KL:g}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        low, high = ax.get_xlim()
        ax.set_xticks([tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 16) if 0.8 * low <= tick <= 1.25 * high])
        ax.xaxis.set_minor_formatter(NullFormatter())
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        ax.set(xlabel="measured bits per number, packed part", ylabel=f"{benchmark}: KL")
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.savefig(unfinished, format="png", dpi=200, facecolor="white", metadata={"Software": None})
