"""The style of all plots."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache_compress.files.atomic import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEME = {"ink": "#1b1f24", "muted": "#666e78", "grid": "#dfe3e8"}

# The first six are Okabe and Ito's, which can be told apart with any colour vision; yellow and black are left out.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f8890", "#8766b8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h", "<", ">")

_STYLE = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": THEME["muted"],
    "grid.color": THEME["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style. Text is taken literally, so `$` in a name is no formula."""
    from matplotlib import rc_context

    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of a size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; see `whole_file`."""
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=200, facecolor="white", metadata={"Software": None})
