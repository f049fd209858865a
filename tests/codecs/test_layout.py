"""Byte arithmetic: planes, words, channel order, growth - against sums done by hand."""

import pytest

from kvcache_compress.codecs.layout import words_per_token


def test_widths_that_do_not_pack() -> None:
    for width in (4, 12, 20, 63):
        with pytest.raises(ValueError, match=f"{width} codes per token cannot be packed: a multiple of 8"):
            words_per_token(width)
