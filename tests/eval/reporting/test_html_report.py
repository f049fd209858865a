"""The HTML report: well-formed, self-contained, escaped, and its recommendation."""

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from support.comparison_cells import HOSTILE, cell, comparison

from kvcache_compress.eval.reporting.answer import SHORT
from kvcache_compress.eval.reporting.html_report import by_length, circumstances, heat_maps, options, to_html
from kvcache_compress.eval.reporting.plots import draw
from kvcache_compress.eval.reporting.tables import tables

VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADING = {"src", "srcset", "action", "poster", "data", "formaction", "background"}


class Page(HTMLParser):
    """Parser that checks closing tags and collects ids, links, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attributes:
            assert name not in LOADING
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href"):
                self.links.append(value or "")
            if name == "aria-label":
                self.labels.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def page_of(cells: list[Any]) -> tuple[str, Page]:
    comparison = tables(cells)
    text = to_html(comparison, [draw(table) for table in comparison])
    return text, Page(text)


@pytest.fixture(scope="module")
def page() -> tuple[str, Page]:
    return page_of([*comparison(), cell("full", "perplexity", 0.0, model="second")])


def test_page_is_well_formed_and_alone(page: tuple[str, Page]) -> None:
    text, parsed = page
    assert "http" not in text
    assert "@import" not in text
    assert parsed.tags["link"] == parsed.tags["img"] == parsed.tags["iframe"] == 0
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert parsed.tags["svg"] == 4  # heat maps are tables
    assert all(label for label in parsed.labels)


def test_names_and_messages_are_escaped(page: tuple[str, Page]) -> None:
    parsed = page[1]
    assert parsed.tags["script"] == parsed.tags["b"] == 0
    shown = [data for tag, data in parsed.texts if tag not in ("style", "title")]
    assert any(HOSTILE in data for data in shown)
    assert any("out of memory: tried <b>8 GiB</b>" in data for data in shown)
    assert any("cpu: A & B" in data for data in shown)


def test_answer_comes_first(page: tuple[str, Page]) -> None:
    shown = " ".join("".join(data for tag, data in page[1].texts if tag != "style").split())
    answer = (
        "Per token of a long prompt, tq-4 loses least: KL 0.0020 in wiki at 4.25 bits, 3.8 times fewer than the "
        f"full cache's 16. With fewer bits: {HOSTILE} (0.0100, 2.50 bits). All below 2.50 bits lose more than is "
        "recommended."
    )
    assert answer in shown
    assert (
        "Counting the whole cache at the prompts measured here, tq-4 loses least: KL 0.0020 in wiki at 8.00 bits, 2.0 "
        "times fewer than the full cache's 16. With fewer bits: hqq-4 (0.0112, 4.50 bits)."
    ) in shown
    assert f"{HOSTILE} as a whole (20.00 bits) was larger than the full cache at these prompts." in shown
    assert "hqq-4 failed in a-needle." in shown
    assert "up to 8.5 bits that lose at most a KL divergence of 0.02 nats per token in wiki." in shown
    assert "1 cell failed" in shown
    assert shown.index(answer) < shown.index("All caches")


def test_ten_caches_come_first_and_the_others_are_behind_links() -> None:
    """The second table and the heat maps are folded; each cache is in the second one."""
    losses = {"full": 0.0} | {f"tq-{number}": 0.001 * (number + 1) for number in range(14)}
    cells = [cell(name, "perplexity", loss) for name, loss in losses.items()]
    text, _ = page_of([*cells, *(cell(name, "needle", 1.0) for name in losses)])
    rows = [len(re.findall(r'<th scope="row">', part)) for part in re.findall(r"<table>.*?</table>", text, re.DOTALL)]
    assert rows[:2] == [SHORT, SHORT], "the first caches, and pass keys by length"
    folded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert folded.count('class="maps"') == 0
    assert "tq-13" not in re.sub(r"<svg.*?</svg>", "", folded, flags=re.DOTALL)
    assert text.count('<th scope="row">tq-13</th>') >= 1


def test_one_cell_and_only_failures_are_no_error() -> None:
    for cells in ([cell("full", "perplexity", 0.0)], [cell("tq-4", "perplexity", "no hub")]):
        text, parsed = page_of(cells)
        assert "No compressed cache has finished wiki yet." in text
        assert parsed.tags["svg"] == 0


def test_heat_maps_by_hand() -> None:
    records = [
        {"tokens": length, "total_bytes": 1, "length": length, "depth": depth, "score": score}
        for length, depth, score in ((1024, 0.0, 1.0), (1024, 0.5, 0.25), (4000, 0.0, 0.0))
    ]
    (table,) = tables([cell("tq-4", "needle", 0.4, records=records)])
    (drawn,) = heat_maps(table, table.columns[0])
    assert drawn.lengths == ["1k", "4k"]
    assert [(depth, [square[0] for square in squares]) for depth, squares in drawn.depths] == [
        ("0", ["100", "0"]),
        ("0.5", ["25", "–"]),
    ]
    bright, dark = drawn.depths[0][1]
    assert bright[1:] == ("#fde725", "#000", "1024 tokens, depth 0: 1.000")
    assert dark[1:] == ("#440154", "#fff", "4000 tokens, depth 0: 0.000")


def test_needles_by_length_by_hand() -> None:
    def records(scores: list[float]) -> list[dict[str, Any]]:
        return [
            {"id": f"{n}", "tokens": 10, "total_bytes": 1, "length": 1024 * (n // 2 + 1), "depth": 0.0, "score": score}
            for n, score in enumerate(scores)
        ]

    cells = [
        cell("full", "needle", 1.0, records=records([1.0, 1.0, 1.0, 1.0])),
        cell("tq-4", "needle", 0.5, records=records([1.0, 0.0, 0.25, 0.75])),
        cell("tq-2", "needle", 0.5, records=records([0.5])),
    ]
    (table,) = tables(cells)
    lengths, rows = by_length(table, table.columns[0])
    assert lengths == ["1k", "2k"]
    assert {row.cache: figures for row, figures in rows} == {
        "full": ["2 of 2", "2 of 2"],
        "tq-4": ["1 of 2", "0.500 ± 0.250"],
        "tq-2": ["0.500", "–"],
    }


def test_circumstances_and_options_are_told_once() -> None:
    cells = [*comparison(), cell("tq-4", "perplexity", 0.1, seed=3, commit=None)]
    assert circumstances(cells) == {
        "commands": ["kvcache-compress eval compare a.yaml"],
        "commits": ["abc123"],
        "dates": ["2025-01-02"],
        "seeds": ["0", "3"],
        "dtypes": ["float32"],
        "versions": ["torch 2.13.0"],
        "hardware": ["cpu: A & B"],
    }
    assert options(cells) == {"wiki (perplexity)": ["step=16"], "a-needle (needle)": ["step=16"]}
