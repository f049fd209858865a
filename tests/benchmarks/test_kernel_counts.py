"""The committed counts of the emulated kernels: they are complete, and the best kernels keep them."""

import kernel_counts
import pytest


@pytest.fixture(scope="module")
def table() -> kernel_counts.Table:
    return kernel_counts.load()


def test_every_preset_is_counted(table: kernel_counts.Table) -> None:
    assert tuple(table) == kernel_counts.PRESETS
    assert len(kernel_counts.markdown(table).splitlines()) > len(table)


@pytest.mark.parametrize("name", ["turboquant-4bit", "uniform-4bit"])
def test_codes_are_read_once(table: kernel_counts.Table, name: str) -> None:
    """Accesses to global memory touch no more sectors than hold the stored bytes."""
    counts = table[name]["attend_kernel"]
    stored = kernel_counts.stored_bytes(name)
    assert counts.touched == counts.needed == stored / kernel_counts.SECTOR
