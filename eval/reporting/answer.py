"""Recommendation of a cache: for each budget of bits the best of those that lose little enough."""

from __future__ import annotations

from markupsafe import Markup

from .table_parts import Column, Point, Row
from .tables import FULL_BITS, Bits, Table

BUDGETS = (1.5, 2.5, 3.5, 4.5, 6.5, 8.5)
"""Bits per number for which a cache is recommended: those of the usual names, and half a bit for scales."""

MAX_KL = 0.02
"""Largest KL divergence from the full cache, in nats per token, of a recommended cache.

About 2 % more perplexity. In the committed comparison of SmolLM2, caches within it found at least 19 of 20 pass keys;
those with twice as much missed several.
"""
MAX_SHARE = 0.05
"""Largest loss of a recommended cache where KL is not the leading score.

A share of the full cache's score; nats if that is a log-probability.
"""


SHORT = 10
"""Rows of a report's first table."""


def bound(table: Table, column: Column) -> float | None:
    """Worst value, as in `Table.points`, of a recommended cache; None if the full cache's score is missing or zero."""
    if column.main_score == "kl":
        return MAX_KL
    reference = None if table.full is None else table.full.score(column)
    if not reference:
        return None
    allowed = MAX_SHARE * (1 if column.in_nats else abs(reference))
    return -allowed if column.higher_is_better else reference + allowed


def recommended(table: Table, bits: Bits) -> list[tuple[float, Point]]:
    """The best cache of the leading benchmark for each budget of bits, with the least budget that it needs.

    Caches that lose more than `bound` allows, or take more than the largest budget, are left out.
    """
    points = _within(table, bits)
    by_row: dict[int, tuple[float, Point]] = {}
    for budget in BUDGETS:
        if affordable := [point for point in points if point.bits <= budget]:
            best = _best(affordable, table.columns[0])
            by_row.setdefault(best.row.number, (budget, best))
    return list(by_row.values())


def shortlist(table: Table) -> list[Row]:
    """At most `SHORT` caches to look at first, by falling bits: the full one, the recommended ones, the best of each
    peer and of each method, then others by their loss.

    Left out unless recommended are modes of papers (`-paper` in the name) and other windows (`name@...`) of a cache
    that is in the table itself.
    """
    column = table.columns[0]
    points = sorted(table.points(column, "packed_bits"), key=lambda p: -p.value if column.higher_is_better else p.value)
    names = {row.cache for row in table.rows}
    plain = [p.row for p in points if "-paper" not in p.row.cache and not _is_variant(p.row.cache, names)]
    best_of_family: dict[str, Row] = {}
    for row in plain:
        best_of_family.setdefault(row.family, row)
    wanted = [
        *(row for row in table.rows if row.lossless),
        *(point.row for _, point in recommended(table, "packed_bits")),
        *sorted(best_of_family.values(), key=lambda row: not row.peer),
        *plain,
    ]
    chosen = {row.number: row for row in wanted}
    first = list(chosen.values())[:SHORT] or table.rows[:SHORT]
    return sorted(first, key=lambda row: (not row.lossless, -(row.packed_bits or 0), row.number))


def _is_variant(name: str, names: set[str]) -> bool:
    base, at, _ = name.partition("@")
    return bool(at) and base in names


def summary(table: Table) -> list[str]:
    """Recommend caches by the leading benchmark: sentences of HTML."""
    column = table.columns[0]
    if not table.points(column, "packed_bits"):
        return [Markup("No compressed cache has finished {} yet.").format(column.name)]
    if bound(table, column) is None:
        return [Markup("No cache can be recommended: the full cache has no score in {}, or zero.").format(column.name)]
    packed, whole = recommended(table, "packed_bits"), recommended(table, "all_bits")
    named = {point.row.number: point.row for _, point in [*packed, *whole]}
    return [
        _sentence(table, "packed_bits", "Per token of a long prompt"),
        _sentence(table, "all_bits", "Counting the whole cache at the prompts measured here"),
        *(
            Markup("{} as a whole ({:.2f} bits) was larger than the full cache at these prompts.").format(
                row.cache, row.all_bits
            )
            for row in named.values()
            if table.outgrown(row)
        ),
        *(
            Markup("{} failed in {}.").format(row.cache, ", ".join(failed))
            for row in named.values()
            if (failed := [name for name, cell in row.cells.items() if cell.error is not None])
        ),
        Markup("Recommended are caches of up to {:g} bits that lose at most {} in {}.").format(
            BUDGETS[-1], _bound_text(column), column.name
        ),
    ]


def _sentence(table: Table, bits: Bits, beginning: str) -> str:
    """Name the cache with the least loss, the best ones of fewer bits, and the bits below which none is recommended."""
    column = table.columns[0]
    points = [point for point in table.points(column, bits) if point.bits <= BUDGETS[-1]]
    if not points:
        return Markup("{}, every cache takes more than {:g} bits.").format(beginning, BUDGETS[-1])
    best_caches = recommended(table, bits)
    if not best_caches:
        text = Markup("{}, none is recommended: the least loss is that of {} ({}).")
        best = _best(points, column)
        return text.format(beginning, best.row.cache, _figures(table, column, best))
    (_, best), *smaller = reversed(best_caches)
    text = Markup(
        "{}, <strong>{}</strong> loses least: {} {} in {} at {:.2f} bits, {:.1f} times fewer than the full cache's {}."
    ).format(
        beginning,
        best.row.cache,
        column.label,
        _value(table, column, best.row),
        column.name,
        best.bits,
        FULL_BITS / best.bits,
        FULL_BITS,
    )
    parts = [
        Markup("<strong>{}</strong> ({})").format(point.row.cache, _figures(table, column, point))
        for _, point in smaller
    ]
    if parts:
        text += Markup(" With fewer bits: ") + Markup(", ").join(parts) + "."
    least = min(point.bits for point in _within(table, bits))
    if points[0].bits < least:
        text += Markup(" All below {:.2f} bits lose more than is recommended.").format(least)
    return text


def _within(table: Table, bits: Bits) -> list[Point]:
    """Points that lose no more than `bound` allows, up to rounding."""
    column = table.columns[0]
    most = bound(table, column)
    if most is None:
        return []
    sign = -1 if column.higher_is_better else 1
    return [point for point in table.points(column, bits) if sign * (point.value - most) < 1e-9]


def _best(points: list[Point], column: Column) -> Point:
    return max(points, key=lambda point: (point.value if column.higher_is_better else -point.value, -point.bits))


def _figures(table: Table, column: Column, point: Point) -> str:
    return f"{_value(table, column, point.row)}, {point.bits:.2f} bits"


def _value(table: Table, column: Column, row: Row) -> str:
    score, difference = table.score_texts(row, column)
    return score if difference is None else f"{score} ({difference})"


def _bound_text(column: Column) -> str:
    if column.main_score == "kl":
        return f"a KL divergence of {MAX_KL:g} nats per token"
    if column.in_nats:
        return f"{MAX_SHARE:g} nats of {column.label}"
    return f"{100 * MAX_SHARE:g} % of the full cache's {column.label}"
