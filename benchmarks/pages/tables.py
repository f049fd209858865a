"""The table of a comparison of one model: a row for each cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache_compress.eval.runner.table import Cell

MISSING = "–"


@dataclass(frozen=True)
class Row:
    """A cache.

    Attributes:
        cache: its name.
        family: its method, the peer's back end, or the beginning of its name.
        lossless: True if it compresses nothing on purpose.
        packed_bits: bits per packed number in the first benchmark that the cache has finished.
        all_bits: bits per number of the whole cache in that benchmark.
        cells: its cells by benchmark.
    """

    cache: str
    family: str
    lossless: bool
    packed_bits: float | None
    all_bits: float | None
    cells: dict[str, Cell]


class Table(NamedTuple):
    """A model's caches. The full cache comes first, the others by method and falling bits."""

    model: str
    rows: list[Row]


def table_of(cells: Sequence[Cell]) -> Table:
    """Make the table of cells of one model. Sizes are those of a perplexity benchmark, if there is one."""
    by_cache: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_cache.setdefault(cell.cache["name"], {})[cell.benchmark["name"]] = cell
    rows = []
    for name, of_cache in by_cache.items():
        some, *_ = of_cache.values()
        done = [cell for cell in of_cache.values() if cell.error is None]
        done.sort(key=lambda cell: (cell.benchmark["kind"] != "perplexity", cell.benchmark["name"]))
        packed, whole = (done[0].packed_bits, done[0].all_bits) if done else (None, None)
        rows.append(Row(name, family(some), some.cache["lossless"], packed, whole, of_cache))
    rows.sort(key=lambda row: (not row.lossless, row.family, -(row.packed_bits or 0), row.cache))
    return Table(cells[0].model, rows)


def family(cell: Cell) -> str:
    """The method or back end of a cell's cache; `full` for the full cache."""
    if cell.cache["lossless"]:
        return "full"
    config = cell.cache["config"]
    methods = [config.get(side, {}).get("method", "none") for side in ("keys", "values")]
    method = next((method for method in methods if method != "none"), None)
    peer = config.get("backend") if config.get("class") == "QuantizedCache" else None
    name: str = method or peer or cell.cache["name"].partition("@")[0].partition("-")[0]
    return name


def bits_text(bits: float | None) -> str:
    return MISSING if bits is None else f"{bits:.2f}"


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]], texts: Sequence[int] = (0,)) -> str:
    """A Markdown table. Columns are aligned as figures, except those with an index (from either end) in `texts`."""
    left = {index % len(heads) for index in texts}
    rule = "|".join("---" if index in left else "---:" for index in range(len(heads)))
    head, *lines = (f"| {' | '.join(line)} |" for line in (heads, *rows))
    return "\n".join([head, f"|{rule}|", *lines])
