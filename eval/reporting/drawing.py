"""Style shared by all plots."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEME = {"ink": "#1b1f24", "muted": "#666e78", "grid": "#dfe3e8"}

# The first six: Okabe and Ito's colours, told apart with any colour vision, without yellow and black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f8890", "#8766b8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h", "<", ">")

PRINTED: dict[str, Any] = {"dpi": 200, "facecolor": "white", "metadata": {"Software": None}}
"""Options of `savefig` for figures beside a report."""

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


def require_matplotlib() -> None:
    """Raise ImportError, with the remedy, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f'plots need matplotlib: pip install "kvcache-compress[eval]" ({error})') from error


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of all plots; text is taken literally, `$` and any script included."""
    from matplotlib import rc_context

    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of a size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def shortened(text: str, length: int = 26) -> str:
    """Shorten a text to `length` characters by cutting its middle."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-(length - length // 2 - 1) :]}"
