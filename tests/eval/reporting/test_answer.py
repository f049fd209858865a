"""Recommended caches of a comparison: none that loses much, whatever its bits."""

import html
from typing import Any

import pytest
from support.comparison_cells import HOSTILE, cell, comparison

from kvcache_compress.eval.reporting.answer import MAX_KL, SHORT, bound, recommended, shortlist, summary
from kvcache_compress.eval.reporting.plots import pareto
from kvcache_compress.eval.reporting.tables import Table, tables


def test_recommended_by_hand() -> None:
    (table,) = tables(comparison())
    # Packed: up to 1.5 bits nothing; 2.5 bits HOSTILE (0.01 against 0.04); 4.5 bits tq-4 (0.002).
    assert [(budget, p.row.cache) for budget, p in recommended(table, "packed_bits")] == [(2.5, HOSTILE), (4.5, "tq-4")]
    # Whole: 4.5 bits hqq-4; tq-2 (6 bits, 0.04) is worse; 8.5 bits tq-4. HOSTILE, at 20 bits, is in no budget.
    assert [(budget, p.row.cache) for budget, p in recommended(table, "all_bits")] == [(4.5, "hqq-4"), (8.5, "tq-4")]
    assert [table.outgrown(row) for row in table.rows] == [False, True, False, False, False]


def test_first_caches_by_hand() -> None:
    """The full and the recommended ones, the best of each peer and method, and no mode of a paper or other window."""
    losses = {f"tq-{number}": 0.1 + number for number in range(9)} | {"hqq-4": 5.0, "tq-4": 0.002, "tq-4@sinks=0": 0.05}
    losses |= {"tq-paper": 0.03, "own": 9.0}
    cells = [cell("full", "perplexity", 0.0, bits=(16.0, 16.0))]
    cells += [cell(name, "perplexity", loss, bits=(4.0 + loss / 100, 5.0)) for name, loss in losses.items()]
    (table,) = tables(cells)
    first = [row.cache for row in shortlist(table)]
    assert len(first) == SHORT
    assert first[0] == "full"
    assert {"tq-4", "hqq-4", "own", "tq-0"} <= set(first)
    assert not {"tq-paper", "tq-4@sinks=0", "tq-8"} & set(first)
    (alone,) = tables([cell("tq-4", "perplexity", "failed"), cell("tq-2", "perplexity", "failed")])
    assert len(shortlist(alone)) == 2


def answer(table: Table) -> str:
    return html.unescape(" ".join(summary(table)))


def test_a_loss_above_the_bound_is_not_recommended() -> None:
    """If all caches lose too much, the report says so, with the best one's bits, and recommends none."""
    cells = [
        cell("full", "perplexity", 0.0, bits=(16.0, 16.0)),
        cell("tq-4", "perplexity", 0.0018, bits=(4.25, 7.02)),
        cell("hqq-2", "perplexity", 1.3238, bits=(2.5, 2.5)),
        cell("tq-2", "perplexity", MAX_KL, bits=(3.5, 6.0)),
    ]
    (table,) = tables(cells)
    assert [(budget, p.row.cache) for budget, p in recommended(table, "all_bits")] == [(6.5, "tq-2"), (8.5, "tq-4")]
    assert "hqq-2" not in answer(table)
    assert "8.5 bits: KL" not in answer(table)
    assert "at 7.02 bits, 2.3 times fewer than the full cache's 16. With fewer bits:" in answer(table)
    assert answer(table).count("All below") == 2

    (table,) = tables([cells[0], cells[2]])
    assert recommended(table, "packed_bits") == recommended(table, "all_bits") == []
    assert summary(table)[0] == (
        "Per token of a long prompt, none is recommended: the least loss is that of hqq-2 (1.3238, 2.50 bits)."
    )
    (table,) = tables([cells[0], cell("hqq-2", "perplexity", 0.001, bits=(9.0, 20.0))])
    assert "Per token of a long prompt, every cache takes more than 8.5 bits." in answer(table)


def scored(name: str, scores: dict[str, float]) -> Table:
    """A table of one benchmark with a score of which more is better."""
    benchmark = {**cell("full", "needle", 0.0).benchmark, "main_score": name}
    cells = (cell(cache, "needle", x, benchmark=benchmark, scores={name: x}) for cache, x in scores.items())
    (table,) = tables(list(cells))
    return table


@pytest.mark.parametrize(
    ("name", "full", "within", "beyond", "words"),
    [
        ("recall", 1.0, 0.95, 0.94, "5 % of the full cache's recall"),
        ("average", 10.0, 9.5, 9.4, "5 % of the full cache's average"),
        ("answer_logprob", -1.2, -1.25, -1.26, "0.05 nats of answer logprob"),
        ("logprob", -0.04, -0.09, -0.1, "0.05 nats of logprob"),
    ],
)
def test_bound_where_no_kl_leads(name: str, full: float, within: float, beyond: float, words: str) -> None:
    """The bound is a share of the full cache's score, or nats of a log-probability, and is itself allowed."""
    table = scored(name, {"full": full, "tq-4": within, "tq-2": beyond})
    assert bound(table, table.columns[0]) == pytest.approx(within - full)
    assert [point.row.cache for _, point in recommended(table, "packed_bits")] == ["tq-4"]
    assert words in answer(table)


@pytest.mark.parametrize("scores", [{"tq-4": 0.5}, {"full": 0.0, "tq-4": 0.0}])
def test_nothing_is_recommended_without_anything_to_lose(scores: dict[str, float]) -> None:
    table = scored("recall", scores)
    assert recommended(table, "packed_bits") == []
    assert answer(table) == "No cache can be recommended: the full cache has no score in a-needle, or zero."


@pytest.mark.parametrize(
    ("losses", "shaded"),
    [
        ({"tq-4": 0.002, "tq-2": 0.4}, True),
        ({"tq-4": 0.3, "tq-2": 0.4}, True),
        ({"tq-4": 0.002, "tq-2": 0.003}, False),
    ],
)
def test_the_plot_shades_what_is_not_recommended(losses: dict[str, float], shaded: bool) -> None:
    """Only plots of the leading benchmark are shaded, and their axis stays as wide."""
    kl = [cell(cache, "perplexity", loss) for cache, loss in {"full": 0.0, **losses}.items()]
    (table,) = tables([*kl, *(cell(cache, "needle", 0.5 if cache == "tq-2" else 1.0) for cache in ("full", *losses))])
    for column, expected in zip(table.columns, (shaded, False), strict=True):
        plot = pareto(table, column, "packed_bits")
        (ax,) = plot.figure.axes
        labels = [text.get_text() for text in plot.figure.legends[0].get_texts()]
        assert ("above 0.02: not recommended" in labels) == expected
        patches: list[Any] = list(ax.patches)
        assert len(patches) == expected
        for patch in patches:
            low, high = ax.get_ylim()
            assert patch.get_y() == pytest.approx(max(low, MAX_KL))
            assert patch.get_y() + patch.get_height() == pytest.approx(high)
            assert high < 2
