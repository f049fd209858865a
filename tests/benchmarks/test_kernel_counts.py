"""The counts of the emulated kernels: the page has those of the results, and the best kernels keep them."""

import kernel_counts
import pytest
from readme import render


@pytest.fixture(scope="module")
def table() -> kernel_counts.Table:
    return kernel_counts.load()


def test_page_has_the_committed_counts(table: kernel_counts.Table) -> None:
    assert tuple(table) == kernel_counts.PRESETS
    page = kernel_counts.PAGE.read_text(encoding="utf-8")
    expected = render(page, {"kernel counts": kernel_counts.markdown(table)})
    assert page == expected, "run: python benchmarks/kernel_counts.py --table"


@pytest.mark.parametrize("name", ["turboquant-4bit", "uniform-4bit", "uniform-2bit"])
def test_codes_are_read_once(table: kernel_counts.Table, name: str) -> None:
    """Accesses to global memory touch no more sectors than hold the stored bytes."""
    counts = table[name]["attend_kernel"]
    stored = kernel_counts.stored_bytes(kernel_counts.attention_variants()[name])
    assert counts.touched == counts.needed == stored / kernel_counts.SECTOR
