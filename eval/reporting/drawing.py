"""Shared parts of the plots: style, SVG and PNG output, labels that do not overlap.

`Plot.svg` is for inlining into HTML, whose CSS then sets the colours of text and lines (`--ink`, `--muted`, `--grid`,
`--surface`), so that one drawing serves light and dark pages. `Plot.png` is for files.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache_compress.eval.provenance.artifacts import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEME = {"ink": "#1b1f24", "muted": "#666e78", "grid": "#dfe3e8", "surface": "#fefefe"}

# The first six: Okabe and Ito's colours, told apart with any colour vision, without yellow and black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d5a", "#7f8890", "#8766b8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h", "<", ">")

PRINTED: dict[str, Any] = {"dpi": 200, "facecolor": "white", "metadata": {"Software": None}}
"""Options of `savefig` for figures beside a report."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcache-compress",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": THEME["muted"],
    "axes.labelcolor": THEME["ink"],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": THEME["ink"],
    "xtick.color": THEME["muted"],
    "ytick.color": THEME["muted"],
    "grid.color": THEME["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass
class Plot:
    """A drawing.

    Attributes:
        kind: `pareto`, `memory`, `needle`, or `map`.
        name: for files and ids, unique within a report.
        alt: text alternative.
        figure: the drawing itself.
        tips: tooltips by element id.
        title: a line to set above the plot.
        subject: the same in a few words.
    """

    kind: str
    name: str
    alt: str
    figure: Figure
    tips: dict[str, str] = field(default_factory=dict)
    title: str = ""
    subject: str = ""

    def svg(self) -> str:
        """A self-contained `<svg>` element as wide as its container, with unique ids."""
        stream = io.StringIO()
        without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with style():
            self.figure.savefig(stream, format="svg", metadata=without, transparent=True)
        text = stream.getvalue()
        (box,) = re.findall(r'<svg[^>]*(viewBox="[^"]*")', text)
        text = text[text.index(">", text.index("<svg")) + 1 :]
        text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        for gid, tip in self.tips.items():
            opening = f'<g id="{self.name}-{gid}">'
            text = text.replace(opening, f"{opening}<title>{html.escape(tip)}</title>")
        for name, color in THEME.items():
            text = text.replace(color, f"var(--{name})")
        return f'<svg role="img" aria-label="{html.escape(self.alt)}" {box}>{text}'

    def png(self, folder: Path) -> Path:
        """Write `NAME.png` into a folder, on a white background."""
        path = folder / f"{self.name}.png"
        with style():
            save_figure(self.figure, path, **PRINTED)
        return path


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


def new_figure(width: float, height: float, *, axes: bool = True) -> tuple[Figure, Any]:
    """Make a figure of a size in inches, without a window, and its axes if wanted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot() if axes else None


def shortened(text: str, length: int = 26) -> str:
    """Shorten a text to `length` characters by cutting its middle."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-(length - length // 2 - 1) :]}"


@dataclass(frozen=True)
class Label:
    """A text for a point in data coordinates; a needed one is placed first and never left out."""

    x: float
    y: float
    text: str
    needed: bool


def place_labels(
    figure: Figure, ax: Axes, labels: Sequence[Label], *, line: Sequence[tuple[float, float]], upwards: bool
) -> None:
    """Write labels beside their points, where they cover neither each other nor a point nor a line.

    Each takes the nearest free place, with a thin line to the point if that is not beside it. A label that is not
    needed and finds no place is left out.

    Args:
        labels: every point has one.
        line: corners of a line of level and upright pieces.
        upwards: look for free space above the points first, else below.
    """
    figure.draw_without_rendering()  # the layout has to be final before anything is measured
    figure.set_layout_engine("none")
    frame, scale = ax.get_window_extent(), figure.dpi / 72
    points = [tuple(ax.transData.transform((label.x, label.y))) for label in labels]
    corners = [tuple(ax.transData.transform(corner)) for corner in line]
    taken = [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in points]
    taken += [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in itertools.pairwise(corners)]
    sign = 1 if upwards else -1
    angles = [math.radians(sign * degrees) for degrees in (135, 45, 180, 0, 90, 225, 315, 270)]
    for label, (x, y) in sorted(zip(labels, points, strict=True), key=lambda pair: not pair[0].needed):
        size, color = (8, THEME["ink"]) if label.needed else (6.5, THEME["muted"])
        text = ax.text(label.x, label.y, label.text, fontsize=size)
        extent = text.get_window_extent()
        text.remove()
        width, height = extent.width, extent.height
        for distance in (5, 9, 14, 20, 28, 38, 50) if label.needed else (5, 9, 14):
            for angle in angles:
                dx = math.cos(angle) * (distance * scale + width / 2)
                dy = math.sin(angle) * (distance * scale + height / 2)
                box = (x + dx - width / 2, y + dy - height / 2, x + dx + width / 2, y + dy + height / 2)
                inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
                if inside and not any(_overlap(box, other) for other in taken):
                    break
            else:
                continue
            break
        else:
            if not label.needed:
                continue
        taken.append(box)
        ax.annotate(
            label.text,
            (label.x, label.y),
            (dx / scale, dy / scale),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=color,
            zorder=4,
            arrowprops={"arrowstyle": "-", "color": THEME["muted"], "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
            if distance >= 14
            else None,
        )


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
