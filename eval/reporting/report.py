"""Reports of a comparison's folder: Markdown, CSV, plots, and one HTML file.

    kvcache-compress eval report FOLDER

writes `report.md`, `report.csv`, `report.html` and `plots/*.png` into the folder, from the cells in it. They can be
written at any time, also while the comparison still runs.
"""

from __future__ import annotations

import csv
import html
import io
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_compress.eval.provenance.results import write_atomically
from kvcache_compress.eval.runner.cells import Cell, read_cells

from .drawing import require_matplotlib
from .table_parts import Column, Row
from .tables import FAILED, MISSING, Table, tables

__all__ = ["tables", "to_csv", "to_markdown", "write_report"]

_FIXED_COLUMNS = (
    "model",
    "dtype",
    "benchmark",
    "kind",
    "cache",
    "family",
    "lossless",
    "packed_bits",
    "all_bits",
    "packed_tokens",
    "tokens",
    "total_bytes",
    "samples",
    "main_score",
    "higher_is_better",
    "score",
    "difference",
    "uncertainty",
    "seconds",
    "prefill_seconds",
    "seed",
    "date",
    "commit",
    "error",
)


def to_markdown(cells: Sequence[Cell]) -> str:
    """Markdown with a section per model: its table, failed cells, and notes on how to read them.

    The difference from the full cache's score follows in brackets, unless that is zero.

    Raises:
        ValueError: no cells.
    """
    return "\n".join(_section(table) for table in tables(cells))


def to_csv(cells: Sequence[Cell]) -> str:
    """CSV with a line per cell and a column per score; `pandas.read_csv` infers the right types.

    Columns: `model`, `dtype`, `benchmark`, `kind`, `cache`, `family`, `lossless`, `packed_bits`, `all_bits`,
    `packed_tokens` (the least of any sample), `tokens` (of the prompt) and `total_bytes` (means over samples; it and
    the bits count dense tokens as 16 bits), `samples`, `main_score` (its name), `higher_is_better`, `score` (its
    value), `difference` (from the full cache), `uncertainty` (see `Table.uncertainty`), `seconds`, `prefill_seconds`,
    `seed`, `date`, `commit`, `error`, then `scores.NAME` for every score of any benchmark, empty for the others.
    `frame.pivot(index="cache", columns="benchmark", values="score")` is the table of one model;
    `frame.filter(like="scores.")` is all scores.

    Raises:
        ValueError: no cells.
    """
    names = sorted({name for cell in cells for name in cell.scores})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*_FIXED_COLUMNS, *(f"scores.{name}" for name in names)], lineterminator="\n")
    writer.writeheader()
    for table in tables(cells):
        for row in table.rows:
            for column in table.columns:
                if column.name in row.cells:
                    writer.writerow(_csv_line(table, row, column))
    return stream.getvalue()


def write_report(folder: Path) -> list[Path]:
    """Write `report.md`, `report.csv`, `report.html` and `plots/*.png` into a comparison's folder.

    Returns:
        The files written.

    Raises:
        ValueError: no cell in the folder, or a file that is no cell.
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    from .html_report import to_html
    from .plots import draw

    cells = read_cells(folder)
    comparison = tables(cells)
    plots = [draw(table) for table in comparison]
    (folder / "plots").mkdir(exist_ok=True)
    images = [(plot.png(folder / "plots"), plot.alt) for of_table in plots for plot in of_table]
    texts = {
        "report.md": to_markdown(cells) + "".join(f"\n![{_plain(alt)}](plots/{path.name})\n" for path, alt in images),
        "report.csv": to_csv(cells),
        "report.html": to_html(comparison, plots),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [*(folder / name for name in texts), *(path for path, _ in images)]


def _section(table: Table) -> str:
    headings = ["cache", "bits, packed part", "bits, whole cache", "packed tokens, least"]
    headings += [column.heading for column in table.shown]
    lines = [
        f"## {_plain(table.title)}",
        "",
        _line(_plain(heading) for heading in headings),
        _line(["---", *["---:"] * (len(headings) - 1)]),
        *(_line(_row_texts(table, row)) for row in table.rows),
        "",
    ]
    for failure in table.failures:
        where = f"{failure.benchmark}, {', '.join(failure.caches)}"
        lines.append(f"- {FAILED}: {_plain(f'{where}: {failure.message}')}")
    lines += [f"- {_plain(note)}" for note in [*table.doubts, *table.notes]]
    return "\n".join(lines) + "\n"


def _row_texts(table: Table, row: Row) -> Iterable[str]:
    yield _plain(row.cache)
    yield _plain(table.bits_text(row, "packed_bits"))
    yield _plain(table.bits_text(row, "all_bits"))
    yield MISSING if row.packed_tokens is None else str(row.packed_tokens)
    for column in table.shown:
        score, difference = table.score_texts(row, column)
        yield score if difference is None else f"{score} ({difference})"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _plain(text: str) -> str:
    """Escape a text for Markdown, on one line."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _csv_line(table: Table, row: Row, column: Column) -> dict[str, Any]:
    cell = row.cells[column.name]
    tokens = [record["tokens"] for record in cell.records]
    line = {name: getattr(cell, name) for name in _FIXED_COLUMNS if hasattr(cell, name)}
    return {
        **line,
        "benchmark": column.name,
        "kind": column.kind,
        "cache": row.cache,
        "family": row.family,
        "lossless": row.lossless,
        "packed_tokens": cell.packed_tokens.get("least"),
        "tokens": statistics.fmean(tokens) if tokens else None,
        "main_score": column.main_score,
        "higher_is_better": column.higher_is_better,
        "score": row.score(column),
        "difference": table.difference(row, column),
        "uncertainty": table.uncertainty(row, column),
        **{f"scores.{name}": score for name, score in cell.scores.items()},
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of a comparison, finished or not.", file_okay=False)],
) -> None:
    """Write a comparison's report: Markdown, CSV, plots, and one HTML file."""
    for path in write_report(folder):
        typer.echo(path)
