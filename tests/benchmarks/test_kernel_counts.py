"""The committed counts of the emulated kernels are complete."""

import kernel_counts


def test_every_preset_is_counted() -> None:
    table = kernel_counts.load()
    assert tuple(table) == kernel_counts.PRESETS
    assert len(kernel_counts.markdown(table).splitlines()) > len(table)
