"""Report of a comparison: one HTML file, and its plots.

The report of `results.jsonl` is `results.html` and `results-*.png` beside it. It can be written at any time, also while
the comparison still runs.
"""

import base64
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.runner.table import Cell, read_cells
from kvcache_compress.validation import require

from .plots import plot_pareto
from .tables import Table, tables


def to_html(comparison: Sequence[Table], images: Iterable[tuple[str, Path]]) -> str:
    """One page without scripts or requests, with the title and the file of each plot."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    embedded = [(title, base64.b64encode(path.read_bytes()).decode("ascii")) for title, path in images]
    cells = [cell for table in comparison for row in table.rows for cell in row.cells.values()]
    template = environment.get_template("report.html.j2")
    return template.render(comparison=comparison, images=embedded, circumstances=circumstances(cells))


def circumstances(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """The distinct commands, commits, dates, versions, machines, and options of benchmarks."""
    distinct: dict[str, dict[str, None]] = {}
    for cell in cells:
        about = {
            "command": cell.command,
            "commit": cell.commit,
            "date": cell.date[:10],
            "versions": _listed(cell.versions),
            "hardware": _listed(cell.hardware),
            f"options of {cell.benchmark['name']}": _listed(cell.benchmark["options"]),
        }
        for name, value in about.items():
            distinct.setdefault(name, {})[value or ""] = None
    return {name: sorted(filter(None, values)) for name, values in distinct.items()}


def write_report(path: Path) -> list[Path]:
    """Write the report of a table beside it, and return its files.

    Raises:
        ValueError: The file is no table, or has no cell.
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", "plots", "matplotlib")
    comparison = tables(read_cells(path))
    images: list[tuple[str, Path]] = []
    for table in comparison:
        for column in table.columns:
            name = re.sub(r"[^\w.]+", "-", f"{path.stem}-{table.model}-{table.dtype}-{column.name}")
            image = path.with_name(f"{name}.png")
            if plot_pareto(table, column, image):
                images.append((f"{table.title}, {column.name}: bits against loss", image))
    page = path.with_suffix(".html")
    write_atomically(page, to_html(comparison, images))
    return [page, *(image for _, image in images)]


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]], texts: Sequence[int] = (0,)) -> str:
    """A Markdown table. Columns are aligned as figures, except those with an index (from either end) in `texts`."""
    left = {index % len(heads) for index in texts}
    rule = "|".join("---" if index in left else "---:" for index in range(len(heads)))
    head, *lines = (f"| {' | '.join(line)} |" for line in (heads, *rows))
    return "\n".join([head, f"|{rule}|", *lines])


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
