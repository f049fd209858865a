"""Sizes with a unit, read and written."""

import pytest

from kvcache_compress.validation import parse_size, size_text


@pytest.mark.parametrize(
    ("given", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 << 29), ("128K", 1 << 17), (" 4096 ", 4096), ("8kb", 8000)]
)
def test_sizes(given: str, size: int) -> None:
    assert parse_size(given, "memory") == size


@pytest.mark.parametrize("given", ["", "GB", "-2GB", "2XB", "0", "1.5B"])
def test_sizes_that_are_none(given: str) -> None:
    with pytest.raises(ValueError, match=r"memory=.*: .*2GB"):
        parse_size(given, "memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**29, "512.0 MiB"), (1.5 * 2**30, "1.50 GiB"), (2**20, "1.00 MiB"), (2**37, "128.0 GiB"), (3072, "3.00 KiB")],
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert size_text(size) == text
